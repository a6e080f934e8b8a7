"""OpenAI's dialect in front of a real, tiny model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from calls import Tiny
from openai_calls import done, stream, texts


def test_the_first_of_n_answers_is_the_one_of_n_1(tiny: Tiny) -> None:
    client, _ = tiny
    one = texts(done(client, max_tokens=12, seed=5))
    four = texts(done(client, max_tokens=12, seed=5, n=4))
    assert four[0] == one[0]
    assert len(set(four)) == 4
    assert four == texts(done(client, max_tokens=12, seed=5, n=4))
    assert texts(done(client, max_tokens=12, seed=5, n=2)) == four[:2]
    assert len(set(texts(done(client, max_tokens=12, n=3)))) == 3
    assert len(set(texts(done(client, max_tokens=12, n=3, temperature=0)))) == 1


def test_greedy_logprobs_are_bit_equal_to_the_largest(tiny: Tiny) -> None:
    client, _ = tiny
    found = done(client, max_tokens=12, temperature=0, logprobs=5, ignore_eos=True)["choices"][0]["logprobs"]
    for lp, top in zip(found["token_logprobs"], found["top_logprobs"]):
        assert lp == max(top.values())
        assert sum(map(math.exp, top.values())) < 1.001


def test_a_prompt_is_scored_the_same_again_and_again(tiny: Tiny) -> None:
    client, engine = tiny
    prompt = "the house of the four " * 8
    fields = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    done(client, prompt=prompt, max_tokens=2)
    first = done(client, **fields)["choices"][0]
    again = done(client, **fields)
    ids = engine.tokenizer.encode(prompt)
    assert len(first["logprobs"]["tokens"]) == len(ids) > 32
    assert "".join(first["logprobs"]["tokens"]) == prompt == first["text"]
    assert all(isinstance(lp, float) for lp in first["logprobs"]["token_logprobs"][1:])
    pairs = zip(first["logprobs"]["token_logprobs"][1:], again["choices"][0]["logprobs"]["token_logprobs"][1:])
    assert all(abs(a - b) < 1e-4 for a, b in pairs)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert done(client, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_scoring_a_text_gives_what_generating_it_gave(tiny: Tiny) -> None:
    client, _ = tiny
    fields = {"temperature": 0, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    made = done(client, prompt="the ", max_tokens=10, **fields)["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    scored = done(client, prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0)
    after = scored["choices"][0]["logprobs"]["token_logprobs"][-10:]
    for a, b in zip(after, made["logprobs"]["token_logprobs"]):
        assert a == pytest.approx(b, abs=1e-3)


def test_a_scored_prompt_ranks_each_token_among_all(tiny: Tiny) -> None:
    client, engine = tiny
    prompt = "the house of the four " * 20  # longer than a step takes at once
    fields = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    choice = done(client, **fields, prompt_logprobs=5)["choices"][0]
    scores, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    echoed = done(client, **fields, echo=True, logprobs=5)["choices"][0]["logprobs"]
    assert (scores[0], len(scores)) == (None, len(ids))
    assert len(ids) > engine.manager.max_tokens_per_step or len(ids) > 100
    ranks = []
    for token, found, own in zip(ids[1:], scores[1:], echoed["token_logprobs"][1:]):
        one = found[str(token)]
        ranks.append(one["rank"])
        assert one["logprob"] == pytest.approx(own, abs=1e-3)
        assert one["decoded_token"] == engine.tokenizer.decode([token])
        by_rank = sorted(found.values(), key=lambda score: score["rank"])
        assert [s["logprob"] for s in by_rank] == sorted((s["logprob"] for s in by_rank), reverse=True)
        assert [s["rank"] for s in by_rank][:5] == [1, 2, 3, 4, 5]
        assert len(found) == (5 if one["rank"] <= 5 else 6)
    assert max(ranks) > 5


def test_bias_and_penalties_reach_the_sampler(tiny: Tiny) -> None:
    client, engine = tiny
    [token] = engine.tokenizer.encode("q")
    assert texts(done(client, logit_bias={str(token): 100}, max_tokens=5)) == ["qqqqq"]
    fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    plain = texts(done(client, **fields))[0]
    for change in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 3}):
        assert texts(done(client, **fields, **change))[0] != plain
    for same in ({"min_p": 1, "temperature": 1}, {"top_k": 1, "temperature": 2}, {"temperature": 1e-300}):
        assert texts(done(client, **fields | same))[0] == plain


@pytest.mark.parametrize("fields", [{"seed": 1}, {"temperature": 0, "stop": ["the", "\n"]}, {"seed": 2, "n": 3}])
def test_a_real_stream_joins_to_the_whole(tiny: Tiny, fields: dict[str, Any]) -> None:
    client, _ = tiny
    fields = {"max_tokens": 40, "prompt": "the ", **fields}
    pieces: dict[int, str] = {}
    for chunk in stream(client, **fields)[:-1]:
        choice = chunk["choices"][0]
        pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
    assert [pieces[i] for i in sorted(pieces)] == texts(done(client, **fields))
