"""A step that fails: which request is at fault, the others go on, and when the engine is given up."""

from __future__ import annotations

import re
import threading

import pytest

import policies
from batching import InferenceError
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from serving.recovery import EngineBroken, Recovery, is_fatal, is_out_of_memory
from tests.support import SOON
from tests.support.serving import Serve, every_policy, is_answered, kind_of, raising

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class OutOfMemoryError(RuntimeError):
    """An error named like torch's."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("could not create a primitive"), "memory"),
        (OutOfMemoryError("x"), "memory"),
        (RuntimeError(OUT_OF_MEMORY), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you batch_sizes 8 bytes"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "memory"),
        (RuntimeError("CUDA error: device-side assert triggered"), "end"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "end"),
        (RuntimeError("Triton Error [CUDA]: the launch timed out and was terminated"), "end"),
        (SystemError("returned NULL without setting an exception"), "end"),
        (RuntimeError("shape mismatch"), "own"),
        (ValueError("out of memory, said a prompt"), "own"),
    ],
)
def test_errors_of_different_libraries_are_classified(error: Exception, kind: str) -> None:
    classes = {"memory": is_out_of_memory(error), "end": is_fatal(error)}
    assert [name for name, is_so in classes.items() if is_so] == ([] if kind == "own" else [kind])


@every_policy
def test_a_batch_too_large_for_memory_shrinks_and_all_requests_get_their_tokens(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=8)
    served.hold()
    requests = [served.ask(f"r{i}", 6) for i in range(12)]
    too_large = raising(RuntimeError(OUT_OF_MEMORY), lambda plan: len(plan.sequences) > 3)
    served.model.breaks = too_large
    served.model.gate.set()
    assert all(map(is_answered, requests))
    cap = {"nobatch": 1, "static": 3, "dynamic": 3}[policy]  # 8 and 4 fail, 2 and 3 fit
    assert served.manager.slot_cap == cap
    assert served.manager.recovery.out_of_memory == (0 if policy == "nobatch" else 3)
    assert max(it.batch_size for it in served.iterations) == cap
    assert served.is_empty()


@pytest.mark.parametrize("policy", ["static", "dynamic"])
@pytest.mark.parametrize("tokens", [15, 4096], ids=["prompts in several steps", "prompts in one step"])
def test_one_warning_names_the_most_requests_that_fit_into_memory(
    serve: Serve, caplog: pytest.LogCaptureFixture, policy: str, tokens: int
) -> None:
    served = serve(policy, slots=12, max_tokens_per_step=tokens)
    served.hold()
    requests = [served.ask(f"r{i}", 20 + i) for i in range(12)]
    served.model.breaks = raising(MemoryError(), lambda plan: len(plan.sequences) > 4)
    served.model.gate.set()
    assert all(map(is_answered, requests))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [[*map(int, re.findall(r"\d+", warning))] for warning in warnings] == [[12, 4, 4]]
    assert served.manager.slot_cap == 4


@every_policy
def test_a_request_that_runs_out_of_memory_alone_fails_alone_and_all_slots_return(serve: Serve, policy: str) -> None:
    served = serve(policy, slots=8)
    served.hold()
    requests = {f"r{i}": served.ask(f"r{i}", 6) for i in range(8)}
    served.model.breaks = raising(RuntimeError(OUT_OF_MEMORY), lambda plan: any(s.id == "r5" for s in plan.sequences))
    served.model.gate.set()
    assert kind_of(requests.pop("r5")) == "out_of_memory"
    assert all(map(is_answered, requests.values()))
    assert served.manager.slot_cap == (1 if policy == "nobatch" else 8)
    assert served.is_empty()


def test_a_model_releases_memory_before_a_request_is_preempted(serve: Serve) -> None:
    served = serve("dynamic", slots=4)
    full = threading.Event()
    full.set()
    served.model.release_memory = full.clear  # type: ignore[attr-defined]
    served.model.breaks = raising(MemoryError(), lambda plan: full.is_set())
    assert is_answered(served.ask("a", 3))
    assert served.manager.recovery.out_of_memory == 1


def test_an_engine_that_cannot_compute_ends_every_request_with_the_reason(serve: Serve) -> None:
    died: list[str] = []
    served = serve("dynamic", slots=4, on_death=died.append)
    served.hold()
    requests = [served.ask(f"r{i}", 3) for i in range(9)]
    served.model.breaks = raising(RuntimeError("tensor"), lambda plan: True)
    served.model.gate.set()
    for one in requests:
        with pytest.raises(InferenceError, match="3 steps within 60 s") as caught:
            one.wait_for_completion(SOON)
        assert (caught.value.kind, caught.value.retry_after) == ("unavailable_error", 5)
    served.thread.join(SOON)
    assert len(died) == 1
    assert died[0] == served.manager.inbox.failure
    assert "RuntimeError" in died[0]
    with pytest.raises(InferenceError, match="restarting"):
        served.ask("late", 1)


@pytest.mark.parametrize(
    ("error", "steps", "words"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), 1, "only a new process"),
        (SystemError("NULL"), 1, "only a new process"),
        (RuntimeError("CUDA error: unspecified"), 3, "the device no longer computes"),
        (SystemExit(), 1, "SystemExit"),
        (BaseException(), 1, "BaseException"),
    ],
)
def test_a_fatal_error_ends_the_engine_at_once(serve: Serve, error: BaseException, steps: int, words: str) -> None:
    died: list[str] = []
    served = serve("dynamic", on_death=died.append)
    served.model.breaks = raising(error, lambda plan: True)
    assert kind_of(served.ask("a", 3)) == "unavailable_error"
    served.thread.join(SOON)
    assert words in died[0]
    assert len(served.model.computed) == steps


def test_a_failed_step_makes_the_engine_suspect_until_a_probe_succeeds(serve: Serve) -> None:
    served = serve("dynamic", slots=4)
    suspect: list[bool] = []

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if any(seq.id == "bad" for seq in plan.sequences):
            raise RuntimeError("poisoned")
        if plan.number == 0:
            suspect.append(served.manager.recovery.is_suspect)
            assert plan.sequences[0].pages == [0]
        return outputs

    served.hold()
    bad, good = served.ask("bad", 3), served.ask("good", 3)
    served.model.breaks = breaks
    served.model.gate.set()
    assert kind_of(bad) == "server_error"
    assert is_answered(good)
    assert suspect == [True]
    assert not served.manager.recovery.is_suspect
    assert served.is_empty()


class Broken:
    """A model that fails a given number of times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def forward(self, plan: Plan) -> list[Output]:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("again")
        return [7 for _ in plan.sequences]


def recovery_of(times: int, now: list[float]) -> Recovery:
    return Recovery(Broken(times), lambda: Sequence([0], 1), lambda: now[0], pause=lambda seconds: None)


@pytest.mark.parametrize("times", [1, 3, 4, 6])
def test_an_engine_that_recovers_before_the_third_failure_fails_no_request(times: int) -> None:
    scheduler = Scheduler(policies.get_policy("dynamic", max_batch_size=4), PagePool(9, 4))
    scheduler.add(Sequence([1, 2], 3))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert recovery_of(times, [0.0]).compute(scheduler, plan) == [7]


def test_three_failures_are_too_many_only_within_a_minute() -> None:
    now = [0.0]
    recovery = recovery_of(1 << 30, now)
    for _ in range(5):
        assert not recovery.probe()
        now[0] += 31.0
    recovery.probe()
    with pytest.raises(EngineBroken, match="3 steps within 60 s"):
        recovery.probe()


@pytest.mark.parametrize("error", [ValueError("shape mismatch"), MemoryError()], ids=["halves", "fewer"])
def test_a_step_waited_for_the_masks_of_all_its_tries(serve: Serve, error: Exception) -> None:
    served = serve("dynamic", slots=4)
    served.hold()
    requests = [served.ask(f"r{i}", 1) for i in range(4)]
    tries: list[float] = []

    def waits(plan: Plan) -> None:
        plan.mask_seconds = float(len(plan.sequences))
        tries.append(plan.mask_seconds if plan.number else 0.0)  # the probe after a step is not part of it

    served.model.before = waits
    served.model.breaks = raising(error, lambda plan: len(plan.sequences) > 2)
    served.model.gate.set()
    for one in requests:
        one.wait_for_completion(SOON)
    served.end()
    assert max(tries) > 2
    assert sum(iteration.mask_seconds for iteration in served.iterations) == sum(tries)
