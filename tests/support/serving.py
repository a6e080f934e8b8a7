"""A manager whose loop runs on a fake model that answers 0, 1, 2 ...; `serve`, in conftest, starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import policies
from batching import BatchingManager, Inference, InferenceError
from scheduling.iteration import Iteration, Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output
from tests.support import SOON
from tests.support.fakes import FakeModel

ALL = ["nobatch", "static", "dynamic"]

every_policy = pytest.mark.parametrize("policy", ALL)


class Words:
    """Text whose token n is the word n; `stop` raises or tells when to end."""

    def __init__(self, stop: Callable[[int], str | None] | None = None) -> None:
        self.watches = stop is not None
        self.feed = stop or (lambda token: None)

    def text(self, output_ids: list[int]) -> str:
        return "".join(f" {token}" for token in output_ids)


class Served:
    """A manager whose loop runs, and what its observer saw."""

    def __init__(self, policy: str | Policy, slots: int, **options: Any) -> None:
        self.model = FakeModel(range(1 << 20))
        self.pages = options.pop("pages", None) or PagePool(512, 4)
        if isinstance(policy, str):
            policy = policies.get_policy(policy, max_batch_size=slots)
        self.manager = BatchingManager(self.model, pages=self.pages, max_batch_size=slots, **options)
        self.iterations: list[Iteration] = []
        self.left: list[str] = []
        self.manager.observers.append(self.observe)
        self.thread = self.manager.start(policy)

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        if iteration is not None:
            self.iterations.append(iteration)
        self.left += [inference.id for inference in left]

    def ask(self, id: str, num_tokens: int, **options: Any) -> Inference:
        return self.manager.enqueue(inference(id, num_tokens, **options))

    def hold(self, id: str = "first", num_tokens: int = 1) -> Inference:
        """Ask for something and keep the model in its first step."""
        self.model.gate.clear()
        self.model.entered.clear()
        asked = self.ask(id, num_tokens)
        assert self.model.entered.wait(SOON)
        return asked

    def pause_at(self, tokens: int) -> tuple[threading.Event, threading.Event]:
        """Let the model wait when a request has so many tokens; return what tells so, and what lets it go on."""
        reached, go_on = threading.Event(), threading.Event()

        def wait(plan: Plan, outputs: list[Output]) -> list[Output]:
            if any(len(seq.output_ids) == tokens for seq in plan.sequences) and not reached.is_set():
                reached.set()
                assert go_on.wait(SOON)
            return outputs

        self.model.breaks = wait
        return reached, go_on

    def end(self) -> None:
        self.manager.stop()  # first, or what is held could still be answered
        self.model.gate.set()
        self.thread.join(SOON)
        assert not self.thread.is_alive()

    def is_empty(self) -> bool:
        manager = self.manager
        idle = (manager.waiting, manager.running, manager.inbox.places.taken, manager.inbox.open) == (0, 0, 0, {})
        return idle and self.pages.free == self.pages.total


def inference(id: str, num_tokens: int, prompt: int = 3, **options: Any) -> Inference:
    options = {"text": Words()} | options
    return Inference(id, num_tokens, list(range(prompt)), id=id, **options)


def expected(id: str, num_tokens: int) -> str:
    return id + "".join(f" {n}" for n in range(num_tokens))


def kind_of(inference: Inference) -> str:
    with pytest.raises(InferenceError) as caught:
        inference.wait_for_completion(SOON)
    return caught.value.kind


def is_answered(asked: Inference) -> bool:
    """Return whether a request ends with all of its tokens."""
    return asked.wait_for_completion(SOON) == expected(asked.prompt, asked.num_tokens)


def raising(error: BaseException, when: Callable[[Plan], bool]) -> Any:
    """Return what breaks the steps of some plans."""

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        if when(plan):
            raise error
        return outputs

    return breaks


Serve = Callable[..., Served]


@contextmanager
def serving() -> Iterator[Serve]:
    """Give what starts a manager; the loops end with the test."""
    all_served: list[Served] = []

    def start(policy: str | Policy = "dynamic", slots: int = 4, **options: Any) -> Served:
        all_served.append(Served(policy, slots, **options))
        return all_served[-1]

    yield start
    for served in all_served:
        served.end()
