"""Streams: their pieces join to the whole text, they end honestly, and nobody waits for a slow reader."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from calls import PieceTokenizer
from flask import Flask
from flask.testing import FlaskClient
from hypothesis import example, given
from hypothesis import strategies as st
from werkzeug.test import TestResponse

from api.generation import Generation
from generate.text import AnswerText
from models.text.tokenizer import Detokenizer
from serving.wakeup import Wakeup
from tests.support import SOON, in_background, wait_until
from tests.support.fakes import FakeModel

PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture
def app(fresh: Flask) -> Flask:
    return fresh


def post(client: FlaskClient, tokens: int = 6, path: str = PATHS[0], **fields: Any) -> TestResponse:
    """Send a request for a stream of so many tokens in OpenAI's dialect."""
    asked = {"messages": [{"role": "user", "content": "hi"}]} if path == PATHS[1] else {"prompt": "hi"}
    return client.post(path, json={**asked, "max_tokens": tokens, "stream": True, **fields})


def hold(model: FakeModel, tokens: int) -> threading.Event:
    """Return what lets the model go on after so many tokens."""
    go = threading.Event()
    model.before = lambda plan: len(plan.sequences[0].output_ids) == tokens and not go.wait(60) and None
    return go


def events(reply: TestResponse) -> list[Any]:
    """Return the data of all events, after checking the frames."""
    assert reply.status_code == 200, reply.text
    assert reply.content_type == "text/event-stream; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-cache"
    assert reply.headers["X-Accel-Buffering"] == "no"
    text = reply.text
    assert text.endswith("\n\n")
    frames = [f for f in text[:-2].split("\n\n") if not f.startswith(":")]
    assert all(f.startswith("data: ") and "\n" not in f for f in frames)
    assert frames[-1] == "data: [DONE]" or '"error"' in frames[-1]
    return [f[6:] if f == "data: [DONE]" else json.loads(f[5:]) for f in frames]


def joined(chunks: list[Any]) -> str:
    """Return the text of a stream."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk != "[DONE]"]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


# ---------------------------------------------------------------- text

TEXTS = st.lists(st.sampled_from([*b"abcab\n", *"😀é漢".encode(), *range(255, PieceTokenizer.vocab_size)]), max_size=40)
STOPS = st.lists(st.text("abc\né", min_size=1, max_size=4), max_size=4)


def answer_text(stops: list[str], keep: bool, least: int, hide: bool) -> AnswerText:
    hidden = [256] if hide else []
    return AnswerText(
        PieceTokenizer(), stops, keep_stop=keep, min_tokens=least, hidden=hidden  # type: ignore[arg-type]
    )  # fmt: skip


@given(TEXTS, STOPS, st.booleans(), st.integers(0, 5), st.booleans(), st.booleans(), st.data())
@example(list("a😀b".encode()), ["b"], False, 0, False, True, None)
def test_what_a_reader_sees_joins_to_the_whole_text(
    ids: list[int], stops: list[str], keep: bool, least: int, hide: bool, follows: bool, data: Any
) -> None:
    text = answer_text(stops, keep, least, hide)
    growing = text.growing(follows_tokens=follows)
    shown, waiting, seen = "", [], []
    for token in ids:
        seen.append(token)
        if text.watches and text.feed(token):
            break
        waiting.append(token)
        if data is None or data.draw(st.booleans()):
            shown += growing.feed(waiting)
            waiting = []
    whole = text.text(seen)
    assert shown + growing.rest(whole) == whole
    if follows:
        assert growing.shown_tokens <= len(seen)


@given(TEXTS, STOPS, st.integers(0, 5))
@example(list(b"bacab"), ["cccc", "b"], 1)
@example([*b"ab", 257], ["abab", "babc", "bc"], 2)
def test_an_answer_is_cut_at_its_first_stop_that_ends_after_the_least_tokens(
    ids: list[int], stops: list[str], least: int
) -> None:
    text = answer_text(stops, False, least, True)
    fed = next((n for n, token in enumerate(ids, 1) if text.watches and text.feed(token)), None)
    decode = Detokenizer(PieceTokenizer()).feed  # type: ignore[arg-type]
    sure = [decode([] if token == 256 else [token]) for token in ids]  # what each token makes certain

    def stops_of(n: int) -> list[tuple[int, str]]:
        """Return the stops that token n completes, and where they begin."""
        before, now = "".join(sure[: n - 1]), "".join(sure[:n])
        ends = range(len(before) + 1, len(now) + 1)
        return [(end - len(stop), stop) for stop in stops for end in ends if now[:end].endswith(stop)]

    first = next((n for n in range(least + 1, len(ids) + 1) if stops_of(n)), None)
    assert fed == first
    if first is None:
        assert text.text(ids) == PieceTokenizer().decode([t for t in ids if t != 256])
    else:
        begin, stop = min(stops_of(first), key=lambda hit: hit[0])
        assert (text.text(ids[:first]), text.stop_reason) == ("".join(sure)[:begin], stop)


def test_a_stop_is_kept_if_it_is_wanted_and_waits_for_the_fewest_tokens() -> None:
    kept = answer_text(["b"], True, 0, False)
    assert [kept.feed(t) for t in b"ab"] == [None, "stop"]
    assert (kept.text(list(b"ab")), kept.stop_reason) == ("ab", "b")
    late = answer_text(["b"], False, 3, False)
    assert [late.feed(t) for t in b"abcab"] == [None, None, None, None, "stop"]
    assert late.text(list(b"abcab")) == "abca"


@pytest.mark.parametrize(
    ("thinking", "text", "ends"),
    [("open", "ab</think>ab", 12), ("open", "ab</think", None), ("maybe", " <think>b</think>\nb", 19),
     ("maybe", "<thb", 4), ("maybe", "<", None), ("maybe", "\nb", 2), ("none", "b</think>", 1)],
)  # fmt: skip
def test_no_stop_counts_within_the_thinking_part(thinking: Any, text: str, ends: int | None) -> None:
    answer = AnswerText(PieceTokenizer(), ["b"], thinking=thinking)  # type: ignore[arg-type]
    assert next((n for n, token in enumerate(text.encode(), 1) if answer.feed(token)), None) == ends
    assert answer.text(list(text.encode())) == (text if ends is None else text[: ends - 1])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_a_long_stop_does_not_make_a_short_one_count_before_the_least_tokens(
    client: FlaskClient, model: FakeModel, path: str, n: int, kept: bool
) -> None:
    model.says = list(b"He goes. I mean it")
    model.before = lambda plan: time.sleep(0.001)
    fields = {"n": n, "min_tokens": 6, "stop": ["a long stop ", "e"], "include_stop_str_in_output": kept}
    whole = post(client, 18, path, **{**fields, "stream": False}).get_json()
    texts = [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
    assert texts == ["He goes. I me" if kept else "He goes. I m"] * n
    chunks = events(post(client, 18, path, **fields))[:-1]
    for index in range(n):
        assert joined([c for c in chunks if c["choices"][0]["index"] == index]) == texts[index]


# ---------------------------------------------------------------- ends


@pytest.fixture
def late(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the time of a request be over when it has two tokens, whatever its limit is; return what lets the model go on."""
    ends_at = property(lambda self: 1e9 * (len(self.inferences[0].output_ids) < 2), lambda self, at: None)
    monkeypatch.setattr(Generation, "ends_at", ends_at, raising=False)
    go = hold(model, 2)
    yield go
    go.set()


def test_a_stream_whose_own_time_is_over_ends_well(client: FlaskClient, late: threading.Event) -> None:
    chunks = events(post(client, 900, timeout_s=100))
    assert joined(chunks) == "ab"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["choices"][0]["stop_reason"] == "timeout"
    late.set()
    stats: Any = {}
    wait_until(lambda: stats.update(client.get("/stats").get_json()) or stats["requests"] == 1)
    assert (stats["requests-cancelled"], stats["requests-failed"]) == (0, 0)


@pytest.mark.usefixtures("late")
def test_a_stream_that_takes_too_long_says_so(client: FlaskClient) -> None:
    chunks = events(post(client, 900))
    assert chunks[-1]["error"]["type"] == "timeout_error"
    assert joined(chunks[:-1]) in ("a", "ab")


# ---------------------------------------------------------------- pace


def test_the_loop_waits_for_no_reader(app: Flask, client: FlaskClient) -> None:
    reply = post(client, 500)
    manager = app.extensions["service"].engine.manager
    wait_until(lambda: manager.running == 0)
    assert len(joined(events(reply))) == 500


def test_a_request_may_say_how_many_tokens_make_a_chunk(client: FlaskClient, model: FakeModel) -> None:
    go = hold(model, 1)
    reply = post(client, 21, stream_interval=10)
    go.set()
    lengths = [len(joined([chunk])) for chunk in events(reply)[:-1]]
    assert lengths[0] == 1, "the first waits for nobody"
    assert lengths[1] >= 10


def test_notifying_twice_wakes_once_and_never_blocks() -> None:
    wakeup = Wakeup()
    assert not wakeup.wait(0)
    wakeup.notify()
    wakeup.notify()
    assert wakeup.wait(0)
    assert not wakeup.wait(0.001)
    with in_background(lambda: wakeup.wait(SOON)) as heard:
        wakeup.notify()
    assert heard == [True]


def test_many_streams_at_once_all_get_their_own(app: Flask) -> None:
    with ThreadPoolExecutor(15) as pool:
        replies = [*pool.map(lambda n: joined(events(post(app.test_client(), n))), range(1, 16))]
    assert replies == ["abcdefghijklmnopqrstuvwxyz"[:n] for n in range(1, 16)]
