"""What an ingress knows of its replicas, what it reads and adds in bodies, and how answers of many become one."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from made_up import REPORT

from fleet import bodies, merged
from fleet.pool import KEPT, Known, Pool, Replica
from fleet.routers import ROUTERS, Asked

A, B = Replica("a", "http://a"), Replica("b", "http://b")


def report(at: float, running: int = 0, waiting: int = 0) -> dict[str, Any]:
    return REPORT | {"at": at, "running": running, "waiting": waiting}


def test_a_report_counts_only_what_others_have_open() -> None:
    known = Known(A)
    for at in (1.0, 2.0, 4.0):
        known.change(+1, at)
    known.report(report(3.0, running=2, waiting=5))  # two of these seven were our own at that time
    assert (known.open, known.load) == (3, 8)
    known.change(-1, 5.0)
    assert known.load == 7


def test_a_request_that_was_opened_while_a_report_was_made_is_not_of_others() -> None:
    known = Known(A)
    known.change(+1, 1.0)
    known.change(+1, 3.1)
    known.report(report(3.0, running=2) | {"until": 3.2})
    assert known.load == 2
    known.change(-1, 4.1)
    known.report(report(4.0, running=5) | {"until": 4.2})
    assert known.load == 1 + 3


def test_an_old_report_changes_nothing() -> None:
    known = Known(A)
    known.report(report(3.0, running=4))
    known.report(report(2.0, running=9))
    assert known.load == 4


def test_a_burst_between_two_reports_counts_although_its_history_is_cut() -> None:
    known = Known(A)
    for k in range(2 * KEPT):
        known.change(+1, float(k))
    known.report(report(2.0 * KEPT, running=2 * KEPT))
    assert known.load == 2 * KEPT


def test_a_burst_is_spread_although_reports_are_old() -> None:
    pool = Pool(ROUTERS["least-loaded"](Random(0)), clock=lambda: 10.0)
    for _ in range(8):
        pool.update([(A, report(1.0)), (B, report(1.0))])
        pool.change(pool.order(Asked())[0].name, +1)
    assert [known.open for known in pool.known.values()] == [4, 4]


def test_a_replica_that_broke_rests_and_comes_back() -> None:
    now = 0.0
    pool = Pool(ROUTERS["round-robin"](Random(0)), clock=lambda: now)
    pool.update([(A, {}), (B, {})])
    pool.rest("a")
    assert pool.order(Asked()) == [B]
    pool.rest("b")
    assert pool.order(Asked()) == []
    now = 2.0
    assert sorted(pool.order(Asked())) == [A, B]


def test_open_requests_of_a_replica_that_comes_back_still_count() -> None:
    pool = Pool(ROUTERS["round-robin"](Random(0)))
    pool.update([(A, {})])
    pool.change("a", +1)
    for replicas in ([], [(A, {})]):
        pool.update(replicas)
    assert pool.known["a"].open == 1
    pool.change("a", -1)
    assert pool.known["a"].open == 0


def test_a_replica_that_is_gone_is_forgotten() -> None:
    pool = Pool(ROUTERS["round-robin"](Random(0)))
    pool.update([(A, {}), (B, {})])
    pool.update([(B, {})])
    pool.change("a", -1)
    pool.rest("a")
    assert pool.order(Asked()) == [B]


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
    assert bodies.seeded(path, body, bodies.read(body), 7) == expected
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
        ("/generate", b'{"inputs":"x","parameters":{"best_of":2}}'),
        ("/generate", b'{"inputs":"x","parameters":{"seed":1}}'),
        ("/generate", b'{"inputs":"x","parameters":null}'),
        ("/generate", b'{"parameters":{"a":1},"x":{"parameters":{}},"inputs":"x"}'),
    ],
)
def test_other_bodies_stay_as_they_are(path: str, body: bytes) -> None:
    assert bodies.seeded(path, body, bodies.read(body), 7) == body


def test_prompts_share_the_blocks_that_they_share() -> None:
    first, second = (bodies.blocks("s" * (2 * bodies.BLOCK) + end * bodies.BLOCK + "rest") for end in "ab")
    assert len(first) == len(second) == 3
    assert [x == y for x, y in zip(first, second)] == [True, True, False]


def test_a_session_is_that_of_the_header_or_the_user() -> None:
    assert bodies.asked("/inference", {"prompt": "x", "user": "u"}, "").session == "u"
    assert bodies.asked("/generate", {"inputs": "x", "parameters": {"user": "u"}}, "").session == "u"
    assert bodies.asked("/inference", {"prompt": "x", "user": "u"}, "s").session == "s"
    assert bodies.asked("/inference", {"prompt": 3, "user": ["u"]}, "").session == ""


def test_metrics_get_a_label_and_each_family_stays_together() -> None:
    text = '# HELP m What.\n# TYPE m counter\nm_total 1.0\nm_total{a="x y"} 2.0\n# HELP n N.\n# TYPE n gauge\nn 3.0\n'
    assert merged.metrics({"a": text, "b": text}).splitlines() == [
        "# HELP m What.", "# TYPE m counter", 'm_total{replica="a"} 1.0', 'm_total{replica="a",a="x y"} 2.0',
        'm_total{replica="b"} 1.0', 'm_total{replica="b",a="x y"} 2.0',
        "# HELP n N.", "# TYPE n gauge", 'n{replica="a"} 3.0', 'n{replica="b"} 3.0',
    ]  # fmt: skip
