"""What is read in a request and counted in an answer, in each dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integrations.queue.counted import LARGEST, Counter
from integrations.queue.hints import Allowance, Means, pieces, read_hints
from integrations.queue.sites import LONGEST_REST, REST_SECONDS, retry_after


@pytest.mark.parametrize(
    ("fields", "limit", "length"),
    [
        ({"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5}, 5, 5),
        ({"prompt": "one two", "options": {"num_predict": 7}}, 7, 2),
        ({"inputs": "one two", "parameters": {"max_new_tokens": 8}}, 8, 2),
        ({"system": "be", "messages": [{"content": [{"type": "text", "text": "one"}]}], "max_tokens": True}, None, 3),
        ({"prompt": [1, 2, 3], "n_predict": -1}, None, 5),
        ({}, None, 1),
        ({"max_tokens": 1e9, "user": 3, "n": "x", "model": 4, "messages": {"a": None}}, None, 1),
    ],
)
def test_lengths_and_limits_are_read_in_each_dialect(fields: dict[str, Any], limit: int | None, length: int) -> None:
    found = read_hints(fields, {}, "10.0.0.1")
    assert (found.limit, len(found.prompt)) == (limit, length)


def test_a_client_is_its_header_else_its_field_else_its_key_else_its_address() -> None:
    headers, fields = {"X-Queue-Client": "alice", "Authorization": "Bearer secret"}, {"user": "bob"}
    keyed = read_hints({}, {"Authorization": "Bearer secret"}, "10.0.0.1").client
    assert read_hints(fields, headers, "10.0.0.1").client == "alice"
    assert read_hints(fields, {"Authorization": "x"}, "10.0.0.1").client == "bob"
    assert keyed.startswith("key-")
    assert "secret" not in keyed
    assert read_hints({}, {}, "10.0.0.1").client == "10.0.0.1"
    assert read_hints(fields, headers, "10.0.0.1", "key").client == keyed
    assert read_hints(fields, headers, "10.0.0.1", "address").client == "10.0.0.1"


def test_hints_of_the_wrong_type_count_as_absent() -> None:
    for value in ("nan", "inf", "x", "", "1e400"):
        found = read_hints({}, {"X-Queue-Priority": value, "X-Queue-Slo": value}, "")
        assert (found.priority, found.slo_s) == (0, None)
    found = read_hints({"priority": 5, "slo_s": 2}, {"X-Queue-Priority": "-9999", "X-Queue-Slo": "-1"}, "")
    assert (found.priority, found.slo_s) == (-1000, None)


def test_a_program_and_its_sessions_are_named_by_the_body_else_by_headers() -> None:
    headers = {"X-Session-Id": "s", "X-Parent-Session-Id": "up", "X-Program-Id": "p"}
    found = read_hints({}, headers, "")
    assert (found.program, found.session, found.parent) == ("p", "s", "up")
    named = read_hints({"program": "mine", "session_id": "own"}, headers, "")
    assert (named.program, named.session, named.parent) == ("mine", "own", "up")
    assert read_hints({"program": 3, "session": ["x"]}, {}, "").program == ""


def test_equal_texts_have_equal_stand_ins() -> None:
    assert pieces("hello world") == pieces("hello world") != pieces("hello there")
    assert len(pieces("\ud800 x" * 100_000)) > 100_000


@pytest.mark.parametrize(
    ("kind", "body", "tokens"),
    [
        (
            "text/event-stream",
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[{"delta":{}}]}\n\n',
            1,
        ),
        ("text/event-stream", b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{"completion_tokens":5}}\n\n', 5),
        ("application/x-ndjson", b'{"response":"a"}\n{"response":"b"}\n{"done":true,"eval_count":9}\n', 9),
        ("application/json", b'{"choices":[{"message":{"content":"x"}}],"usage":{"completion_tokens":3}}', 3),
        ("application/json", b'{"content":"12345678","stop":true}', 2),
        ("application/json", b'{"content":"x","usage":{"completion_tokens":10000000}}', 54),  # a token for each byte
        ("application/json", b'{"message":{"content":"","tool_calls":[{"function":{"name":"f"}}]},"eval_count":9}', 9),
        ("text/event-stream", b'data: {"choices":[],"usage":{"completion_tokens":9}}\n\n', 0),
        ("application/json", b"[" * 100_000, 0),
        ("application/json", b"\xff\xfe", 0),
        ("image/png", b'{"usage":{"completion_tokens":3}}', 0),
    ],
)
def test_the_counts_do_not_depend_on_how_bytes_are_cut(kind: str, body: bytes, tokens: int) -> None:
    for size in (1, 7, len(body)):
        counter = Counter(kind, 200)
        if len(body) > 1000 and size < 1000:
            continue
        found = sum(counter.feed(body[i : i + size]) for i in range(0, len(body), size)) + counter.end()
        assert found == counter.tokens == tokens


def stream(texts: list[str], reported: int | None = None) -> list[bytes]:
    """Return the events of a stream, with the count at its end."""
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    events += [{"choices": [], "usage": {"completion_tokens": reported}}] if reported else []
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


def test_several_tokens_in_an_event_are_counted_by_the_length_of_tokens_in_earlier_answers() -> None:
    first = Counter("text/event-stream", 200)
    counts = [first.feed(event) for event in stream(["abcd efgh "] * 10, reported=20)]
    assert counts == [*[1] * 10, 10]
    assert first.hidden == 0.1
    later = Counter("text/event-stream", 200, first.hidden)
    for event in stream(["abcd efgh "] * 10):
        later.feed(event)
    assert later.tokens == 16  # rather too few than too many: what has passed cannot be taken back
    assert later.end() == 4
    assert later.feed(stream([], reported=21)[0]) == 1


def test_one_odd_answer_of_many_makes_no_token_up() -> None:
    means = Means()
    for reported in [10] * 20 + [30]:
        taught = Counter("text/event-stream", 200, means.of("m"))
        for event in stream(["word "] * 10, reported=reported):
            taught.feed(event)
        means.learn("m", taught.hidden or 0.0)
    later = Counter("text/event-stream", 200, means.of("m"))
    for event in stream(["word "] * 10, reported=10):
        later.feed(event)
    assert (later.tokens, later.end()) == (10, 0)


def test_the_count_of_an_upstream_wins_over_the_length_of_its_text() -> None:
    counter = Counter("text/event-stream", 200, hidden=0.15)
    for event in reversed(stream(["a long piece of text"], reported=2)):
        counter.feed(event)
    assert (counter.tokens, counter.end()) == (2, 0)


def test_a_stream_with_a_token_in_each_event_hides_none() -> None:
    counter = Counter("text/event-stream", 200)
    for event in stream(["a long piece of text"] * 10, reported=10):
        counter.feed(event)
    assert (counter.tokens, counter.hidden) == (10, 0.0)


def test_a_count_that_the_text_does_not_bear_out_teaches_nothing() -> None:
    counter = Counter("text/event-stream", 200)
    for event in stream(["a", "b"], reported=1000):
        counter.feed(event)
    assert (counter.tokens, counter.hidden) == (len(b"".join(stream(["a", "b"], reported=1000))), None)


def test_a_huge_answer_is_not_kept() -> None:
    counter = Counter("application/json", 200)
    for _ in range(8):
        counter.feed(b"x" * (1 << 20))
    assert len(counter._rest) <= LARGEST
    assert counter.end() == 0


def test_an_error_is_known_by_its_status_or_its_field() -> None:
    assert Counter("", 500).is_error
    counter = Counter("text/event-stream", 200)
    counter.feed(b"data: " + json.dumps({"error": {"message": "x"}}).encode() + b"\n\n")
    assert counter.is_error


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("0", 0.05), ("1e9", LONGEST_REST), ("nan", REST_SECONDS), ("Fri", REST_SECONDS)]
)
def test_a_pause_that_an_upstream_asks_for_has_bounds(text: str, seconds: float) -> None:
    assert retry_after({"Retry-After": text}) == seconds


def test_the_length_of_a_chat_template_is_learned() -> None:
    overhead = Means()
    for _ in range(50):
        overhead.learn("m", 12)
    assert (overhead.of("m"), overhead.of("other")) == (12, 0)


def test_a_client_gets_so_many_tokens_per_minute_and_pays_for_more_later() -> None:
    now = 0.0
    allowance = Allowance(60, lambda: now)
    allowance.pay("a", 90)
    assert (allowance.wait("a"), allowance.wait("b")) == (30.0, 0.0)
    now = 31.0
    assert allowance.wait("a") == 0.0
