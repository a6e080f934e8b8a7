"""What if: the requests that a server has just served, simulated under other policies, each as a lane of step records.

A question takes a process of its own (`simulate/what_if.py`) at the lowest priority, one at a time, and its answer goes to
the client as it came, because decoding it here would keep the GIL from the loop. This module must not know HTTP.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from observe.question import Server, trace
from observe.recording import Served
from observe.simulator_process import SimulatorProcess, in_pieces
from serving.inference import InferenceError

TIMEOUT = 60.0  # seconds for one answer
FEWEST_REQUESTS = 4
FEWEST_STEPS = 10
PAUSE = 2.0  # seconds without an arrival, after which a request that finds the server idle begins another load
STRETCHES_PER_LINE = 10
KINDS = {"ValueError": "invalid_request_error", "UnknownWorkload": "not_found_error"}  # of the simulator's exceptions


@dataclass(frozen=True)
class Workload:
    """Requests by the name of a workload of the client, at a rate per second."""

    name: str
    rate: float
    seed: int


class WhatIf:
    """Answers how policies would have served the requests that `server` has served."""

    def __init__(self, server: Server, context: int, *, command: Rows[str] = (), timeout: float = TIMEOUT) -> None:
        self._server = server
        self._context = context
        self._process = SimulatorProcess("simulate.what_if", timeout=timeout, command=command)
        self._timeout = timeout
        self._busy = threading.Lock()

    def answer(
        self,
        policies: Rows[str],
        count: int,
        *,
        span: tuple[float, float] | None = None,
        workload: Workload | None = None,
    ) -> bytes:
        """Return the answer as JSON, about at most `count` requests: those of a workload, of a span of time, or the latest.

        Raise InferenceError if there is too little to simulate, another question is being answered, or it fails.
        """
        if not self._busy.acquire(blocking=False):
            raise InferenceError("overloaded", "another simulation is running (limit 1). Try again in a few seconds", 3)
        try:
            requests = [] if workload is not None else self._requests(count, span)
            answer = self._process.ask(self._question(policies, requests, count, workload))
        except TimeoutError:
            raise InferenceError(
                "timeout_error",
                f"the simulation did not finish within {self._timeout:g} s. Name fewer policies, or lower count",
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise InferenceError("unavailable_error", f"the simulation ended early ({error}). Try again", 3) from None
        finally:
            self._process.end()  # which frees its memory
            self._busy.release()
        if answer.startswith(b'{"problem"'):
            kind, _, text = json.loads(answer)["problem"].partition(": ")
            raise InferenceError(KINDS.get(kind, "server_error"), text[:1000])
        return answer

    def stop(self) -> None:
        """End the process, and with it the question that it answers."""
        self._process.end()

    def _requests(self, count: int, span: tuple[float, float] | None) -> list[Served]:
        recording = self._server.recording
        requests = recording.arrived() if span is None else recording.arrived(*span)
        requests = latest(requests, count) if span is None else requests[:count]
        if recording.policy != self._server.manager.policy_name:  # it was switched, and has not made a step yet
            requests = []
        answered, steps = sum(one.latency is not None for one in requests), len(recording.steps())
        if answered < FEWEST_REQUESTS or steps < FEWEST_STEPS:
            raise InferenceError(
                "not_found_error",
                f"there is too little to simulate: {answered} finished requests of this policy and {steps} measured steps "
                f"are recorded, at least {FEWEST_REQUESTS} and {FEWEST_STEPS} are needed. Send a load first",
            )
        return requests

    def _question(
        self, policies: Rows[str], requests: list[Served], count: int, workload: Workload | None
    ) -> Iterator[str]:
        recording = self._server.recording
        yield from trace(recording, requests)
        if requests:
            end = max(one.at + (one.latency or 0.0) for one in requests)
            yield json.dumps({"ids": [one.id for one in requests]}) + "\n"
            steps = (step.row() for step in recording.stretches(requests[0].at, end))
            yield from in_pieces("stretches", steps, STRETCHES_PER_LINE)
        drawn: dict[str, Any] | None = None
        if workload is not None:
            drawn = {**workload.__dict__, "count": count, "context": self._context}
        yield json.dumps({"ask": {"policies": list(policies), "workload": drawn, **self._server.describe()}}) + "\n"


def latest(requests: list[Served], count: int) -> list[Served]:
    """Return at most `count` of the requests: those after the last pause, but not fewer than are needed."""
    requests = requests[-count:]
    for i in range(len(requests) - FEWEST_REQUESTS, 0, -1):
        if requests[i].alone and requests[i].at - requests[i - 1].at >= PAUSE:
            return requests[i:]
    return requests
