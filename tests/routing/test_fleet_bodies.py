"""What a queue reads in bodies."""

from __future__ import annotations

from routing import bodies


def test_prompts_share_the_blocks_that_they_share() -> None:
    first, second = (bodies.blocks("s" * (2 * bodies.BLOCK) + end * bodies.BLOCK + "rest") for end in "ab")
    assert len(first) == len(second) == 3
    assert [x == y for x, y in zip(first, second)] == [True, True, False]


def test_a_session_is_that_of_the_header_or_the_user() -> None:
    assert bodies.routing_key({"prompt": "x", "user": "u"}, "").session == "u"
    assert bodies.routing_key({"inputs": "x", "parameters": {"user": "u"}}, "").session == "u"
    assert bodies.routing_key({"prompt": "x", "user": "u"}, "s").session == "s"
    assert bodies.routing_key({"prompt": 3, "user": ["u"]}, "").session == ""
