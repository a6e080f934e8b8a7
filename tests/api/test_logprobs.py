"""/v1/completions: log probabilities, echo, usage and streams."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from flask.testing import FlaskClient
from openai_calls import USER, done, name_bytes, stream, texts

from tests.support.fakes import FakeModel


def test_logprobs_have_four_lists_of_equal_length(client: FlaskClient, model: FakeModel) -> None:
    model.says = list("aé😀".encode())
    choice = done(client, prompt="hé", max_tokens=7, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert list(found) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert {len(v) for v in found.values()} == {7}
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", *(f"bytes:\\x{b:02x}" for b in "😀".encode())]
    assert found["text_offset"] == [2, 3, 3, 4, 4, 4, 4]
    assert all(top[t] == lp == max(top.values()) for t, lp, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"]))  # fmt: skip
    assert all(len(top) == 2 for top in found["top_logprobs"])


def test_an_echo_is_scored_from_its_second_token(client: FlaskClient) -> None:
    found = done(client, prompt="xyz", max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert found["tokens"] == ["x", "y", "z", "a"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 2, 3]
    answer = done(client, prompt="xyz", max_tokens=0, echo=True, logprobs=0)
    assert texts(answer) == ["xyz"]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert texts(done(client, prompt="x" * 1024, max_tokens=0, echo=True)) == ["x" * 1024]


def test_a_prompt_is_scored_in_vllms_form(client: FlaskClient) -> None:
    choice = done(client, prompt="xyé", max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [list(scores) for scores in rest] == [["121", "122"], ["195", "196"], ["169", "170"]]
    assert rest[0]["121"] == {"logprob": -0.5, "rank": 1, "decoded_token": "y"}
    assert rest[0]["122"] == {"logprob": -2.0, "rank": 2, "decoded_token": "z"}
    assert rest[1]["195"]["decoded_token"] == "\ufffd"
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in done(client)["choices"][0]
    alone = done(client, prompt=["x", "xy"], prompt_logprobs=0)["choices"]
    assert alone[0]["prompt_logprobs"] == [None]
    assert list(alone[1]["prompt_logprobs"][1]) == ["121"]


def test_an_echo_and_a_scored_prompt_have_each_their_own_number_of_alternatives(client: FlaskClient) -> None:
    for few, many in ((1, 3), (3, 1)):
        choice = done(client, max_tokens=1, echo=True, logprobs=few, prompt_logprobs=many)["choices"][0]
        assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, few, few]
        assert [scores and len(scores) for scores in choice["prompt_logprobs"]] == [None, many]


def test_the_first_chunk_of_each_choice_has_the_scores_of_its_prompt(client: FlaskClient) -> None:
    firsts: dict[int, Any] = {}
    for chunk in stream(client, prompt=["xy", "z"], n=2, max_tokens=9, prompt_logprobs=1)[:-1]:
        choice = chunk["choices"][0]
        assert ("prompt_logprobs" in choice) == (choice["index"] not in firsts)
        firsts.setdefault(choice["index"], choice.get("prompt_logprobs"))
    scored = [None, {"121": {"logprob": -0.5, "rank": 1, "decoded_token": "y"}}]
    assert firsts == {0: scored, 1: scored, 2: [None], 3: [None]}


def test_streamed_logprobs_are_those_of_the_text_beside_them(client: FlaskClient, model: FakeModel) -> None:
    model.says = list("aé😀bb".encode())
    model.before = lambda plan: time.sleep(0.004)
    fields = {"max_tokens": 18, "logprobs": 1, "echo": True, "stop": "bbb", "prompt": "é"}
    whole = done(client, **fields)["choices"][0]
    lists: dict[str, list[Any]] = {key: [] for key in whole["logprobs"]}
    text = ""
    for chunk in stream(client, **fields)[:-1]:
        choice = chunk["choices"][0]
        text += choice["text"]
        for key, values in choice["logprobs"].items():
            lists[key] += values
        raw = b"".join(name_bytes(t) for t in lists["tokens"])
        assert raw.decode() == text, "a token comes with its text"
    assert lists == whole["logprobs"]
    assert text == whole["text"]


def test_a_stream_tells_its_usage_if_it_is_asked_to(client: FlaskClient) -> None:
    plain = stream(client)
    assert all("usage" not in chunk for chunk in plain[:-1])
    asked = stream(client, stream_options={"include_usage": True})
    assert asked[-1] == "[DONE]"
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in asked[:-2])
    options = {"include_usage": True, "continuous_usage_stats": True}
    each = stream(client, stream_options=options)
    assert each[-3]["usage"]["total_tokens"] == 5
    same = ("id", "object", "created", "model")
    assert len({tuple(chunk[k] for k in same) for chunk in asked[:-1]}) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_says_how_many_tokens_its_choice_has_so_far(
    client: FlaskClient, model: FakeModel, path: str
) -> None:
    model.before = lambda plan: time.sleep(0.002)  # several tokens make a chunk
    reply = client.post(path, json={
        "prompt": ["ab", "c"], "messages": [USER], "n": 2, "max_tokens": 30, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    })  # fmt: skip
    *chunks, last = [json.loads(f[6:]) for f in reply.text.split("\n\n")[:-2]]
    texts: dict[int, str] = {}
    told: dict[int, dict[str, int]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        new = choice["text"] if "text" in choice else choice["delta"]["content"]
        texts[choice["index"]] = texts.get(choice["index"], "") + new
        told[choice["index"]] = chunk["usage"]
        assert chunk["usage"]["completion_tokens"] == len(texts[choice["index"]])  # a token is a letter
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + len(texts[choice["index"]])
    assert last["usage"]["completion_tokens"] == 30 * len(told)
    assert sum(u["prompt_tokens"] for u in told.values()) == 2 * last["usage"]["prompt_tokens"]
