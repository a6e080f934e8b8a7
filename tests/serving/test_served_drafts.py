"""Requests that get several tokens in a step: their streams and ends, and a drafter that fails."""

from __future__ import annotations

from typing import Any

from generate.drafters.guarded import GuardedDrafter
from scheduling.sequence import Sequence
from scheduling.speculation import Offer, Speculator
from serving.wakeup import Wakeup
from simulate.laws.scripted_drafter import ScriptedDrafter
from tests.support import SOON
from tests.support.serving import Serve, Words, expected, inference, is_answered, raising


def drafter(every: int = 1 << 30) -> ScriptedDrafter:
    return ScriptedDrafter(lambda seq, place: place, every)


def test_a_stream_gets_all_tokens_of_a_step_and_an_answer_ends_where_it_should(serve: Serve) -> None:
    served = serve(speculator=Speculator(drafter(), 3))
    long = served.ask("long", 10, wakeup=Wakeup())
    stopped = inference("stopped", 50, text=Words(lambda token: "stop" if token == 6 else None))
    served.manager.enqueue(stopped)
    assert is_answered(long)
    assert stopped.wait_for_completion(SOON) == expected("stopped", 7)
    assert (stopped.finish_reason, long.finish_reason) == ("stop", "length")
    assert long.sequence.accepted > 0
    assert sum(drafted.accepted for it in served.iterations for drafted in it.drafts) > long.sequence.accepted
    assert served.is_empty()


def test_a_step_that_fails_is_computed_again_without_its_drafts(serve: Serve) -> None:
    served = serve(speculator=Speculator(drafter(), 3))
    served.model.breaks = raising(RuntimeError("no memory for so many rows"), lambda plan: bool(plan.drafts))
    assert is_answered(served.ask("a", 6))
    assert served.manager.recovery.steps_failed > 0
    assert served.is_empty()


class Broken(ScriptedDrafter):
    """Fails when it is asked for the given method."""

    def __init__(self, method: str) -> None:
        super().__init__(lambda seq, place: place, 2)
        self.method = method

    def fail(self, method: str) -> None:
        if method == self.method:
            raise RuntimeError("a bug in a drafter")

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        self.fail("survey")
        return super().survey(sequences)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        self.fail("propose")
        return super().propose(sequences, counts)

    def forget(self, seq: Sequence) -> None:
        self.fail("forget")


def test_a_drafter_that_fails_ends_the_drafting_and_no_request(serve: Serve, caplog: Any) -> None:
    for method in ("survey", "propose", "forget"):
        served = serve(speculator=Speculator(GuardedDrafter(Broken(method)), 3))
        for name in "ab":
            assert served.ask(name, 6).wait_for_completion(SOON) == expected(name, 6)
        drafted = [it.n for it in served.iterations if it.drafts]
        assert bool(drafted) == (method == "forget")  # which is first called when a request has ended
        assert served.is_empty()
    assert sum("the drafter failed" in record.message for record in caplog.records) == 3
