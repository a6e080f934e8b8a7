"""The steps of an upstream, made from the bursts that were seen and the lengths of the answers once they are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from integrations.queue.steps import Steps
from scheduling.iteration import Iteration, Member, Members, SlotSteps
from serving.inference import Inference
from tests.integrations.queue.scripted import Front, queued

PROMPT = 10


def answer(id: str, joined: float, first: float, last: float, tokens: int) -> Inference:
    inference = Inference("", 100, [0] * PROMPT, id=id, client="c", on_end=lambda: None)
    seq = inference.sequence
    seq.scheduled_at, seq.first_token_at, seq.last_token_at = joined, first, last
    seq.output_ids += [0] * tokens
    return inference


def burst(began: float, ended: float, rows: dict[str, int], joined: str = "", left: str = "") -> Iteration:
    """Return the record of a burst with these tokens of each request; the first are those of its prompt."""
    members = Members.of(
        Member(id, i, "prefill" if n in (0, PROMPT) else "idle" if n < 0 else "decode", max(n, 0), 0, 100)
        for i, (id, n) in enumerate(rows.items())
    )
    ends = [(id, "stop") for id in left]
    return Iteration(0, began, ended - began, "p", 0, members, list(joined), ends, SlotSteps(idle=4.0), 0, 0)


class Recorder:
    def __init__(self) -> None:
        self.steps: list[Iteration] = []
        self.left: list[str] = []
        self.observe = Steps(self._tell).observe

    def _tell(self, step: Iteration | None, left: list[Inference]) -> None:
        self.steps += [step] if step is not None else []
        self.left += [inference.id for inference in left]

    def tokens(self, id: str) -> list[int]:
        return [m.tokens for step in self.steps for m in step.members if m.id == id]


def test_a_very_long_answer_in_one_piece_has_a_bounded_number_of_steps() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 1, {"w": 0}, joined="w"), [])
    recorder.observe(burst(1, 5, {"w": 300_000}, left="w"), [answer("w", 0, 5, 5, 300_000)])
    assert len(recorder.steps) < 5000
    assert sum(recorder.tokens("w")) == pytest.approx(300_000, rel=0.01)
    assert recorder.steps[-1].t + recorder.steps[-1].seconds == pytest.approx(5)


def test_an_answer_in_one_piece_has_a_token_in_each_step_that_a_stream_shows() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 1, {"s": PROMPT, "w": 0}, joined="sw"), [])
    for t in range(1, 4):
        recorder.observe(burst(t, t + 1, {"s": 1, "w": 0}), [])
    ends = [answer("s", 0, 1, 5, 5), answer("w", 0, 5, 5, 5)]
    recorder.observe(burst(4, 5, {"s": 1, "w": 5}, left="sw"), ends)
    assert recorder.tokens("w") == recorder.tokens("s") == [PROMPT, 1, 1, 1, 1]
    assert [step.seconds for step in recorder.steps] == [1, 1, 1, 1, 1]
    assert recorder.left == ["s", "w"]


def test_a_request_that_the_upstream_refuses_holds_no_steps_back() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 1, {"a": PROMPT, "b": 0}, joined="ab"), [])
    recorder.observe(replace(burst(1, 2, {"a": 1}), preempted=["b"]), [])
    recorder.observe(burst(2, 3, {"a": 1}, left="a"), [answer("a", 0, 1, 3, 3)])
    assert (recorder.left, len(recorder.steps)) == (["a"], 3)


def test_answers_in_one_piece_alone_are_spread_over_the_time_that_they_took() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 4, {"a": 4, "b": 0}, joined="ab", left="a"), [answer("a", 0, 4, 4, 4)])
    assert recorder.steps == []  # it is not known yet how many tokens the other one had
    recorder.observe(burst(4, 8, {"b": 8}, left="b"), [answer("b", 0, 8, 8, 8)])
    assert [step.seconds for step in recorder.steps] == pytest.approx([1] * 8)
    assert recorder.tokens("a") == [PROMPT, 1, 1, 1]
    assert recorder.tokens("b") == [PROMPT, *[1] * 7]


def test_a_request_that_joins_others_is_on_its_way_in_the_first_step() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 4, {"a": 0}, joined="a"), [])
    recorder.observe(burst(4, 8, {"a": 8, "b": 0}, joined="b", left="a"), [answer("a", 0, 8, 8, 8)])
    recorder.observe(burst(8, 9, {"b": 4}, left="b"), [answer("b", 4, 9, 9, 4)])
    assert recorder.tokens("b") == [0, PROMPT, 1, 1, 1]


def test_two_bursts_of_one_step_are_one_step() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 1, {"a": PROMPT, "b": PROMPT}, joined="ab"), [])
    for t in range(1, 5):
        recorder.observe(burst(t, t + 0.75, {"a": 1, "b": -1}), [])
        recorder.observe(burst(t + 0.75, t + 1, {"a": -1, "b": 1}), [])
    recorder.observe(burst(5, 6, {"a": 1, "b": 1}, left="ab"), [answer("a", 0, 1, 6, 6), answer("b", 0, 1, 6, 6)])
    assert len(recorder.steps) == 6
    assert [m.tokens for step in recorder.steps[1:] for m in step.members] == [1] * 10


def test_several_tokens_in_one_event_were_as_many_steps() -> None:
    recorder = Recorder()
    recorder.observe(burst(0, 1, {"a": PROMPT}, joined="a"), [])
    recorder.observe(burst(1, 4, {"a": 3}), [])
    recorder.observe(burst(4, 7, {"a": 3}, left="a"), [answer("a", 0, 1, 7, 7)])
    assert recorder.tokens("a") == [PROMPT, *[1] * 6]
    assert [step.seconds for step in recorder.steps] == pytest.approx([1] * 7)


def test_a_request_without_an_answer_leaves_without_a_step() -> None:
    recorder = Recorder()
    recorder.observe(None, [Inference("", 100, [0], id="x", client="c", on_end=lambda: None)])
    assert (recorder.steps, recorder.left) == ([], ["x"])


@queued(slots=3, step=0.015)
async def test_what_if_is_right_where_some_answers_are_streamed_and_others_are_not(front: Front) -> None:
    lengths, errors = (5, 30, 12, 8, 25, 3, 18, 10) * 2, []
    while len(errors) < 5 and (not errors or errors[-1] > 0.25):  # the machine may pause in an attempt
        await front.all(*({"max_tokens": n, "stream": i % 4 == 0, "tag": i} for i, n in enumerate(lengths)))
        await front.until(lambda: front.idle)
        what_if = await front.what_if(len(lengths))
        members = [member for record in what_if["lanes"][0]["records"] for member in record["members"]]
        assert {member["tokens"] for member in members if member["phase"] == "decode"} == {1}
        errors.append(abs(what_if["error"]["latency_mean_s"]))
    assert min(errors) < 0.25
