"""Lengths of answers that are learned while requests finish, and the truth that only an oracle may see."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import policies
from costs.published import MODELS
from policies.orders._learning import Lengths
from scheduling.pages import PagePool
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.simulator import simulate
from tests.support.scheduling import make_scheduler

LONG, SHORT = 7, 8  # the last tokens of prompts with long and with short answers


def answered(prompt: list[int], tokens: int, limit: int = 1000, client: str = "") -> Sequence:
    seq = Sequence(prompt, limit, client=client)
    seq.output_ids = [0] * tokens
    return seq


def taught(pairs: dict[int, int], rounds: int = 200, lengths: Lengths | None = None) -> Lengths:
    """Return what is learned when the prompt that ends with each token gets answers of about so many tokens."""
    lengths, rng = lengths or Lengths(), random.Random(1)
    for _ in range(rounds):
        for last, tokens in pairs.items():
            lengths.learn(answered([rng.randrange(100, 200), last], round(tokens * rng.uniform(0.8, 1.25))))
    return lengths


def guess(lengths: Lengths, last: int, limit: int = 1000, client: str = "") -> float:
    return lengths.predict(Sequence([99, last], limit, client=client))


def test_a_token_of_the_prompt_announces_a_long_answer() -> None:
    lengths = taught({LONG: 400, SHORT: 20})
    assert guess(lengths, LONG) == pytest.approx(400, rel=0.3)
    assert guess(lengths, SHORT) == pytest.approx(20, rel=0.3)


def test_a_client_with_long_answers_gets_long_predictions() -> None:
    lengths = Lengths()
    for _ in range(40):
        lengths.learn(answered([1], 300, client="writer"))
        lengths.learn(answered([1], 10, client="chat"))
    assert guess(lengths, 1, client="writer") > 5 * guess(lengths, 1, client="chat")


def test_answers_that_their_limits_cut_are_predicted_to_be_cut() -> None:
    lengths, rng = Lengths(), random.Random(2)
    for _ in range(100):
        limit = rng.randint(10, 200)
        lengths.learn(answered([1], limit, limit))
    assert [guess(lengths, 1, limit) for limit in (20, 80, 190)] == pytest.approx([20, 80, 190], rel=0.1)


def test_before_anything_is_learned_and_where_nothing_can_be_all_predictions_are_equal() -> None:
    assert guess(Lengths(), LONG) == guess(Lengths(), SHORT)
    lengths, rng = Lengths(), random.Random(3)
    for _ in range(200):
        lengths.learn(answered([rng.choice((LONG, SHORT))], rng.choice((20, 400))))
    assert guess(lengths, LONG) == guess(lengths, SHORT)


def test_when_the_meaning_of_prompts_is_turned_round_it_is_learned_anew() -> None:
    lengths = taught({LONG: 20, SHORT: 400}, 10, taught({LONG: 400, SHORT: 20}))
    assert not guess(lengths, LONG) > guess(lengths, SHORT)
    taught({LONG: 20, SHORT: 400}, 200, lengths)
    assert guess(lengths, LONG) < 40 < 200 < guess(lengths, SHORT)


def ending(seq: Sequence, tokens: int) -> Sequence:
    seq.end_after(tokens)
    return seq


def chats(count: int = 60, gap: float = 0.6) -> list[Sequence]:
    """Return requests that all have the same limit, whose prompts' last tokens say how soon their answers end."""
    rng = random.Random(4)
    lasts = [rng.choice((LONG, SHORT)) for _ in range(count)]
    return [
        ending(Sequence([99, last], 500, id=str(i), arrived_at=gap * i), rng.randint(1, 40) + 200 * (last == LONG))
        for i, last in enumerate(lasts)
    ]


def test_an_answer_ends_where_the_model_ends_it_in_long_leaps_and_step_by_step() -> None:
    leaps, steps = (
        simulate(make_scheduler("dynamic", 4), chats(), MODELS["oracle-a"], fast_forward=fast) for fast in (True, False)
    )
    assert [len(seq.output_ids) for seq in leaps.sequences] == [seq.answer_tokens for seq in chats()]
    assert {seq.finish_reason for seq in leaps.sequences} == {"stop"}
    assert [s.finished_at for s in leaps.sequences] == pytest.approx([s.finished_at for s in steps.sequences])


@pytest.mark.parametrize("predictor", ["oracle", "noisy", "uniform", "classes"])
def test_an_oracle_knows_where_a_simulated_answer_ends_and_on_a_server_only_its_limit(predictor: str) -> None:
    policy = policies.get_policy("dynamic+sjf", 4, {"predictor": predictor, "sigma": 0.1, "error": 0.1, "longest": 500})
    assert policy.predict(ending(Sequence([1], 500), 10)) < 200  # type: ignore[attr-defined]
    assert policy.predict(Sequence([1], 500)) > 300  # type: ignore[attr-defined]


def test_shortest_first_by_what_was_learned_is_between_first_come_and_the_truth() -> None:
    oracle, learned, blind = (
        simulate(make_scheduler(name, 1, **options), chats(200, 1.2), MODELS["oracle-a"]).latency.mean()
        for name, options in (
            ("nobatch+sjf", {"predictor": "oracle"}), ("nobatch+sjf", {"predictor": "learned"}), ("nobatch", {})
        )
    )  # fmt: skip
    assert oracle < learned < (oracle + blind) / 2


def test_lightllm_lets_more_in_when_it_has_learned_that_answers_are_shorter_than_their_limits() -> None:
    def most(**options: object) -> int:
        sequences = chats(200, 0.1)
        for seq in sequences:
            seq.answer_tokens = 0  # as on a server
        run = simulate(
            make_scheduler("lightllm", 16, PagePool(101, 16), max_wait=0, **options), sequences, MODELS["oracle-a"]
        )
        return max(seq.batch_max for seq in run.sequences[100:])

    limits, learned = most(), most(predictor="learned")
    assert learned > limits


def test_a_trace_says_which_limits_the_answers_had(tmp_path: Path) -> None:
    trace = tmp_path / "chats.jsonl"
    lines = [{"at": 0, "prompt": "Why?", "num_tokens": 5, "max_tokens": limit} for limit in (50, None, 5)]
    trace.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"at": 1, "prompt_tokens": 3, "num_tokens": 5}])
    )
    limited, unlimited, cut, unsaid = workloads.read(trace).sequences()
    assert (limited.max_tokens, limited.answer_tokens, limited.open_ended) == (50, 5, False)
    assert unlimited.open_ended
    assert [(seq.max_tokens, seq.answer_tokens, seq.open_ended) for seq in (cut, unsaid)] == [(5, 0, False)] * 2
