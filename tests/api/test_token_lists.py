"""What is listed token by token has an entry for each token, whatever part of the text it has, in every dialect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from calls import PieceTokenizer, connected
from dialects import events
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_calls import EOT_ID, USER, name_bytes

from app import create_app
from config import Config
from tests.support.fakes import EOT, FakeModel, fake_engine

MODEL = FakeModel()
WORDS = PieceTokenizer()
SAYS = st.lists(
    st.sampled_from([*b"abc", *"é😀".encode(), 255, *range(EOT_ID, WORDS.vocab_size)]), min_size=1, max_size=12
)
TOKENS = st.integers(1, 14)
STOPS = st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2)


@pytest.fixture(scope="module")
def client() -> Iterator[FlaskClient]:
    MODEL.before = lambda plan: time.sleep(0.0005)  # or a stream would come in one piece
    app = create_app(Config(policy="dynamic", access_log=False))
    for _ in connected(app, fake_engine(MODEL, tokenizer=WORDS)):
        yield app.test_client()


def sent(client: FlaskClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer, or the events of a stream."""
    with client.post(path, json=body) as reply:  # a stream holds its place until it is closed
        assert reply.status_code == 200, reply.text
        return events(reply.text)


def choices(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the text, the ids and the lists of each choice, put together from all chunks."""
    found: dict[int, dict[str, Any]] = {}
    for choice in [choice for answer in answers for choice in answer["choices"]]:
        one = found.setdefault(choice["index"], {"text": "", "ids": []})
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        one["text"] += message["content"]
        one["ids"] += choice["token_ids"]
        one["reason"] = choice["finish_reason"], choice["stop_reason"]
        for name, values in choice["logprobs"].items():
            one[name] = one.get(name, []) + (values or [])
    return [found[index] for index in sorted(found)]


def names(ids: list[int]) -> list[bytes]:
    return [WORDS.token_bytes(token) for token in ids]


def test_openais_lists_fit_the_tokens(client: FlaskClient) -> None:
    @given(
        SAYS, TOKENS, st.booleans(), st.integers(1, 2), STOPS, st.integers(0, 3),
        st.fixed_dictionaries({name: st.booleans() for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")}),
    )  # fmt: skip
    @settings(max_examples=4 * settings.default.max_examples)
    def check(
        says: list[int], most: int, echo: bool, n: int, stops: list[str], least: int, flags: dict[str, bool]
    ) -> None:
        MODEL.says = says
        common = {
            "max_tokens": most,
            "n": n,
            "stop": stops,
            "min_tokens": min(least, most),
            "return_token_ids": True,
            **flags,
        }
        usage = {"stream": True, "stream_options": {"include_usage": True}, "stream_interval": 1}
        body = {"prompt": f"hé{EOT}", "logprobs": 2, "echo": echo, **common}
        whole, pieces = (sent(client, "/v1/completions", body | more) for more in ({}, usage))
        assert choices(pieces) == choices(whole)
        for choice in choices(whole):
            ids = [*("hé".encode() if echo else b""), *([EOT_ID] if echo else []), *choice["ids"]]
            assert [name_bytes(name) for name in choice["tokens"]] == names(ids)
            assert (
                len(choice["token_logprobs"]) == len(choice["top_logprobs"]) == len(choice["text_offset"]) == len(ids)
            )
            assert None not in choice["token_logprobs"][echo:]
            assert all(0 <= one <= other for one, other in pairwise(choice["text_offset"]))
            assert choice["text_offset"][-1] <= len(choice["text"]) + (0 if echo else len(f"hé{EOT}"))
        generated = sum(len(choice["ids"]) for choice in choices(whole))
        assert whole[0]["usage"]["completion_tokens"] == pieces[-1]["usage"]["completion_tokens"] == generated

        body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, **common}
        whole, pieces = (sent(client, "/v1/chat/completions", body | more) for more in ({}, usage))
        assert choices(pieces) == choices(whole)
        for choice in choices(whole):
            assert [bytes(entry["bytes"]) for entry in choice["content"]] == names(choice["ids"])
        generated = sum(len(choice["content"]) for choice in choices(whole))
        assert whole[0]["usage"]["completion_tokens"] == pieces[-1]["usage"]["completion_tokens"] == generated

    check()


def test_tgis_tokens_are_all_listed(client: FlaskClient) -> None:
    @given(SAYS, TOKENS, STOPS)
    @settings(max_examples=4 * settings.default.max_examples)
    def check(says: list[int], most: int, stops: list[str]) -> None:
        MODEL.says = says
        parameters = {"max_new_tokens": most, "stop": stops, "top_n_tokens": 2, "details": True}
        body = {"inputs": "hi", "parameters": parameters}
        [whole] = sent(client, "/generate", body)
        events = sent(client, "/generate_stream", body)
        details = whole["details"]
        assert len(details["tokens"]) == len(details["top_tokens"]) == details["generated_tokens"]
        assert [event["token"] for event in events] == details["tokens"]
        assert [event["top_tokens"] for event in events] == details["top_tokens"]
        assert events[-1]["generated_text"] == whole["generated_text"]
        assert events[-1]["details"]["generated_tokens"] == details["generated_tokens"]
        texts = [token["text"] for token in details["tokens"] if not token["special"]]
        assert "".join(texts) == whole["generated_text"]

    check()


def test_the_original_dialect_counts_the_same_tokens_in_a_stream(client: FlaskClient) -> None:
    @given(SAYS, TOKENS, STOPS, st.booleans())
    def check(says: list[int], most: int, stops: list[str], ignore: bool) -> None:
        MODEL.says = says
        body = {"prompt": "hi", "num_tokens": most, "stop": stops, "ignore_eos": ignore}
        [whole] = sent(client, "/inference", body)
        pieces = sent(client, "/inference", body | {"stream": True})
        assert "hi" + "".join(piece["text"] for piece in pieces) == whole["completion"]
        assert pieces[-1]["num_tokens"] == whole["num_tokens"]

    check()


def test_offsets_of_an_echo_begin_where_its_text_does(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PieceTokenizer, "bos_ids", (EOT_ID,))
    MODEL.says = [*b"ab"]
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 0, "echo": True}
    [choice] = sent(client, "/v1/completions", body)[0]["choices"]
    assert choice["text"] == "hiab"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
