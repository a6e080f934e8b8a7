"""What a queue reads in bodies and what it adds to them."""

from __future__ import annotations

import json

import pytest

from fleet import bodies
from front.parsing import parse


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/inference", b' {"prompt":1.50}', b' {"seed": 7, "prompt":1.50}'),
        ("/generate", b'{"inputs":"x"}', b'{"parameters": {"do_sample": true, "seed": 7}, "inputs":"x"}'),
        ("/generate", b'{"inputs":"x","parameters" : {}}', b'{"inputs":"x","parameters" : {"seed": 7}}'),
        ("/", b'{"parameters":{"top_k":1},"inputs":"x"}', b'{"parameters":{"seed": 7, "top_k":1},"inputs":"x"}'),
        ("/v1/completions", b'{"prompt":[1,2]}', b'{"seed": 7, "prompt":[1,2]}'),
    ],
)
def test_a_seed_is_added_and_every_other_byte_stays(path: str, body: bytes, expected: bytes) -> None:
    assert bodies.seeded(path, body, parse(body), 7) == expected
    assert json.loads(expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference", b'{"prompt":"x","seed":1}'),
        ("/inference", b'{"prompt":"x","seed":null}'),
        ("/inference", b'{"prompt":"x"'),
        ("/inference", b"[1]"),
        ("/inference", b'{"prompt":"' + b"x" * bodies.LARGEST + b'"}'),
        ("/inference", b"[" * 100_000),
        ("/v1/completions", b'{"prompt":["x","y"]}'),
        ("/v1/embeddings", b'{"input":"x"}'),
        ("/api/generate", b'{"prompt":"x"}'),
        ("/generate", b'{"inputs":"x","parameters":{"best_of":2}}'),
        ("/generate", b'{"inputs":"x","parameters":{"seed":1}}'),
        ("/generate", b'{"inputs":"x","parameters":null}'),
        ("/generate", b'{"parameters":{"a":1},"x":{"parameters":{}},"inputs":"x"}'),
    ],
)
def test_other_bodies_stay_as_they_are(path: str, body: bytes) -> None:
    assert bodies.seeded(path, body, parse(body), 7) == body


def test_prompts_share_the_blocks_that_they_share() -> None:
    first, second = (bodies.blocks("s" * (2 * bodies.BLOCK) + end * bodies.BLOCK + "rest") for end in "ab")
    assert len(first) == len(second) == 3
    assert [x == y for x, y in zip(first, second)] == [True, True, False]


def test_a_session_is_that_of_the_header_or_the_user() -> None:
    assert bodies.asked("/inference", {"prompt": "x", "user": "u"}, "").session == "u"
    assert bodies.asked("/generate", {"inputs": "x", "parameters": {"user": "u"}}, "").session == "u"
    assert bodies.asked("/inference", {"prompt": "x", "user": "u"}, "s").session == "s"
    assert bodies.asked("/inference", {"prompt": 3, "user": ["u"]}, "").session == ""
