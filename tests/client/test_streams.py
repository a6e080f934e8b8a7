"""Streams as servers really send them: which text arrived, how many tokens, when the first, and how long between two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from client import client
from client.data import Chat, Planned
from client.report.measure import Outcome
from client.send.dialects import Dialect, Unreadable
from client.send.reading import Reading
from client.send.sse import Events
from client.send.target import Target, known
from tests.support.mock_server import MockServer

GAP = 0.1
WORDS = ["One", " two", " three"]
PLANNED = {"openai": Planned(0, 0.0, "To be", 9), "chat": Planned(0, 0.0, "To be", 9, chat=Chat())}
DONE = b"data: [DONE]\n\n"


def line(event: Any, end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(event).encode() + end


def chunk(api: str, text: str | None = "", finish: str | None = None, used: int | None = None, **delta: Any) -> Any:
    said = {"text": text} if api == "openai" else {"delta": {"content": text, **delta}}
    usage = {} if used is None else {"usage": {"prompt_tokens": 5, "completion_tokens": used}}
    return {"id": "c", "choices": [{"index": 0, **said, "finish_reason": finish}], **usage}


def total(tokens: Any, **fields: Any) -> Any:
    return {"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}, **fields}


def received(api: str, pieces: Sequence[bytes]) -> Outcome:
    """Return the outcome of a stream whose pieces arrive at 0.1, 0.2, 0.3, ... seconds."""
    reading = Reading(PLANNED[api], Dialect(api, True), 0.0, 0.0)
    events = Events()
    for i, piece in enumerate(pieces, 1):
        reading.read(events.cut(piece), GAP * i)
    reading.read(events.end(), GAP * len(pieces))
    return reading.outcome(GAP * len(pieces), *reading.missing())


def words(api: str, end: bytes = b"\n\n", **fields: Any) -> list[bytes]:
    return [line(chunk(api, word) | fields, end) for word in WORDS]


@pytest.mark.parametrize("api", ["openai", "chat"])
@pytest.mark.parametrize(
    "end",
    [
        [line(total(3)), DONE],
        [line(total(3) | {"choices": None}), DONE],
        [line({"usage": total(3.0)["usage"]}), DONE],
        [line({"id": "c"}), b"data:\n\n: ping\n\n", DONE],
        [line(total("3")), line(total(-1)), line(total(1e30)), line(total(None)), DONE],
        [line(total(0)), DONE],
        [b"data: [DONE]"],
        [line(total(3))],
    ],
    ids=["usage", "null choices", "no choices", "nothing", "bad usage", "no usage", "cut newline", "no end"],
)
def test_all_text_counts_however_a_stream_ends(api: str, end: list[bytes]) -> None:
    outcome = received(api, [*words(api), *end])
    assert (outcome.error, outcome.completion, outcome.tokens) == ("", "One two three", 3)
    assert outcome.first == GAP
    assert outcome.itls == pytest.approx([GAP, GAP])


@pytest.mark.parametrize("api", ["openai", "chat"])
def test_a_finish_reason_ends_a_stream_and_half_an_event_does_not(api: str) -> None:
    assert received(api, [*words(api), line(chunk(api, "", "length"))]).error == ""
    assert received(api, words(api)).error == "stream cut"
    reading = Reading(PLANNED[api], Dialect(api, True), 0.0, 0.0)
    with pytest.raises(Unreadable):
        reading.read(Events().cut(b"data: x\n\n"), 0.0)
    assert received(api, [DONE]).error == "unreadable answer"


ONE, TWO, THREE = words("openai")
ROLE, STOP = line(chunk("chat", "", role="assistant")), line(chunk("chat", "", "stop"))
SPREAD = {"tokens": 8, "sizes": [3, 3, 2], "itls": pytest.approx([GAP / 3] * 3 + [GAP / 2] * 2)}
TOKYO = [("", 1), ("東", 2), ("", 3), ("", 4), ("京", 5)]
KINDS: list[dict[str, Any]] = [
    {"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}
]  # fmt: skip


def used(api: str, *counts: int) -> list[bytes]:
    return [line(chunk(api, "x", used=count)) for count in counts]


@pytest.mark.parametrize(
    ("api", "pieces", "expected"),
    [
        *((api, [line(chunk(api, "", "stop"))], {"completion": "", "finish_reason": "stop"}) for api in PLANNED),
        # A gap before n tokens counts n times as an nth of it, also if they arrive in several chunks together.
        *((api, [*used(api, 4, 9, 10), line(total(10))],
           {"chunks": (4, 5, 1), "itls": pytest.approx([GAP / 5] * 5 + [GAP])}) for api in PLANNED),
        ("openai", [ONE, TWO + THREE, ONE + TWO + THREE, line(total(6))],
         {"itls": pytest.approx([GAP / 2] * 2 + [GAP / 3] * 3)}),
        # A total at the end is spread evenly over the chunks.
        ("openai", [ONE, TWO, THREE, line(total(8))], SPREAD),
        ("openai", [ONE, TWO, THREE, line(chunk("openai", "", "length", used=8))], SPREAD),
        # A token without text counts where the usage grows, and a chunk without tokens lengthens the next gap.
        ("openai", [line(chunk("openai", text, used=count)) for text, count in TOKYO],
         {"tokens": 5, "completion": "東京", "first": GAP, "itls": pytest.approx([GAP] * 4)}),
        ("openai", [*used("openai", 1, 1, 2), line(total(2))], {"sizes": [1, 0, 1], "itls": pytest.approx([2 * GAP])}),
        # Reasoning and tool calls are tokens.
        *(("chat", [ROLE, *[line(chunk("chat", None, **kind))] * 3, STOP, line(total(3))],
           {"tokens": 3, "completion": "", "finish_reason": "stop", "first": 2 * GAP,
            "itls": pytest.approx([GAP, GAP])})
          for kind in KINDS),
    ],
)  # fmt: skip
def test_every_token_of_a_stream_counts_and_has_its_gap(
    api: str, pieces: list[bytes], expected: dict[str, Any]
) -> None:
    outcome = received(api, [*pieces, DONE])
    assert outcome.error == ""
    assert {name: getattr(outcome, name) for name in expected} == expected


@pytest.mark.parametrize("end", [b"\r", b"\r\n", b"\n"])
def test_lines_may_end_in_any_way_and_begin_with_a_byte_order_mark(end: bytes) -> None:
    pieces = [*words("chat", end + end), b"data: [DONE]" + end + end]
    whole = received("chat", [b"\xef\xbb\xbf" + pieces[0], *pieces[1:]])
    assert (whole.completion, whole.itls) == ("One two three", pytest.approx([GAP, GAP]))
    events = Events()
    cut = [data for byte in b"".join(pieces) for data in events.cut(bytes([byte]))]
    assert len(cut) == 4


def test_data_of_several_lines_is_one_event_and_a_line_alone_is_one_too() -> None:
    lines = json.dumps(chunk("chat", "One"), indent=1).encode().split(b"\n")
    long = b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"
    assert received("chat", [long, DONE]).completion == "One"
    single = received("chat", [*words("chat", b"\n"), b"data: [DONE]\n"])
    assert (single.completion, single.itls) == ("One two three", pytest.approx([GAP, GAP]))


def test_a_stream_of_tgi_ends_with_the_whole_text_with_details_or_without() -> None:
    dialect, planned = Dialect("tgi", True), Planned(0, 0.0, "To be", 2)
    assert dialect.body(planned)["parameters"]["details"] is True
    for details in (None, {"generated_tokens": 2, "input_length": 3}):
        reading = Reading(planned, dialect, 0.0, 0.0)
        token = {"token": {"id": 5, "text": " a", "special": False}}
        last = {**token, "generated_text": " a a", "details": details}
        reading.read([json.dumps(event).encode() for event in (token, last)], 1.0)
        outcome = reading.outcome(1.0, *reading.missing())
        assert (outcome.error, outcome.tokens, outcome.completion, outcome.sizes) == ("", 2, " a a", [1, 1])


@pytest.mark.parametrize(("owner", "counts"), [("vllm", True), ("effective-batching", True), ("openai", False)])
def test_the_usage_of_each_chunk_is_requested_only_where_it_is_known_to_work(
    server: MockServer, owner: str, counts: bool
) -> None:
    server.models = (200, {"data": [{"id": "m", "owned_by": owner}]})
    dialect = known(Target(server.url, dialect=Dialect("openai", True))).dialect
    options = dialect.body(PLANNED["openai"])["stream_options"]
    assert (dialect.model, options) == (
        "m",
        {"include_usage": True} | ({"continuous_usage_stats": True} if counts else {}),
    )


def test_an_answer_at_once_counts_where_a_stream_was_requested(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda body: (200, {"choices": [{"text": "so"}], "usage": {"completion_tokens": 7}})
    flags = [server.url, "--api", "openai", "--burst", "--numsamples", "1"]
    assert client.main(flags, {}) == 0
    out, err = capsys.readouterr()
    assert "note: the server answers with all tokens at once" in err
    result = json.loads(out.splitlines()[-1])
    assert (result["output_lens"], result["mean_ttft_ms"]) == ([7], None)
    assert server.asked[0]["stream_options"] == {"include_usage": True}  # what each server takes
