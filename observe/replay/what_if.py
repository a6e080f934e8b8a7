"""What if: the requests that a server has just served, simulated under other policies, each as a lane of step records.

A question takes a process of its own (`simulate/measured/what_if.py`) at the lowest priority, one at a time, and its answer goes to
the client as it came, because decoding it here would keep the GIL from the loop. This module must not know HTTP.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from observe.replay.question import Server
from observe.replay.recording import Served
from observe.replay.simulator_process import SimulatorProcess
from scheduling.latest import Latest
from serving.inference import InferenceError

TIMEOUT = 60.0  # seconds for one answer
FEWEST_REQUESTS = 4
FEWEST_STEPS = 10
PAUSE = 2.0  # seconds without an arrival, after which a request that finds the server idle begins another load
KEPT = 100  # answers about single requests
KINDS = {"ValueError": "invalid_request_error", "UnknownWorkload": "not_found_error"}  # of the simulator's exceptions


@dataclass(frozen=True)
class Workload:
    """Requests by the name of a workload of the client, at a rate per second."""

    name: str
    rate: float
    seed: int


class WhatIf:
    """Answers how policies would have served the requests that `server` has served."""

    def __init__(self, server: Server, context: int, *, command: Sequence[str] = (), timeout: float = TIMEOUT) -> None:
        self._server = server
        self._context = context
        self._process = SimulatorProcess("simulate.measured.what_if", timeout=timeout, command=command)
        self._timeout = timeout
        self._busy = threading.Lock()
        self._blamed = Latest[str, bytes](KEPT)  # answers by request

    def answer(
        self,
        policies: Sequence[str],
        count: int,
        *,
        options: Mapping[str, Mapping[str, object]] | None = None,
        span: tuple[float, float] | None = None,
        workload: Workload | None = None,
    ) -> bytes:
        """Return the answer as JSON, about `count` requests: those of a workload, of a span of time, or the latest.

        Raise InferenceError if there is too little to simulate, another question is being answered, or it fails.
        """
        requests = [] if workload is not None else self._requests(count, span)
        drawn = None if workload is None else {**workload.__dict__, "count": count, "context": self._context}
        return self._ask(
            self._server.question(requests, policies=list(policies), options=options or {}, workload=drawn),
            "Name fewer policies, or lower count",
        )

    def blame(self, id: str) -> bytes:
        """Return as JSON which others made a finished request wait or slowed its tokens; the latest answers are kept.

        Raise InferenceError as `answer` does, and if requests that were in the server with it are still running.
        """
        if id not in self._blamed:
            answer = self._ask(
                self._server.question(self._beside(id), blame=id), "Try again when the server is less busy"
            )
            self._blamed[id] = answer
        return self._blamed[id]

    def _ask(self, question: Iterator[str], remedy: str) -> bytes:
        if not self._busy.acquire(blocking=False):
            raise InferenceError("overloaded", "another simulation is running (limit 1). Try again in a few seconds", 3)
        try:
            answer = self._process.ask(question)
        except TimeoutError:
            late = f"the simulation did not finish within {self._timeout:g} s. {remedy}"
            raise InferenceError("timeout_error", late) from None
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

    def _beside(self, id: str) -> list[Served]:
        """Return the requests that arrived before this one left, itself among them.

        They begin where the server was last idle before it and the first recorded call of its program, or with the oldest
        that is recorded: a later beginning would leave out the queue that the request found.
        """
        recording = self._server.recording
        one = recording.find(id)
        if one is None or one.latency is None or recording.policy != self._server.manager.policy_name:
            raise InferenceError(
                "not_found_error",
                f"request {id[:200]!r} is not recorded: only the last 1,000 requests that the active policy answered "
                "completely are. Send it again",
            )
        end = one.at + one.latency
        if recording.oldest_open() <= end:
            still = "requests that were in the server with it are still running. Try again when they have left"
            raise InferenceError("unavailable_error", still, 3)
        requests = recording.arrived(last=end)
        first = min((other.at for other in requests if one.program and other.program == one.program), default=one.at)
        begin = max((i for i, other in enumerate(requests) if other.alone and other.at <= first), default=0)
        requests = requests[begin:]
        if one not in requests or len(recording.steps()) < FEWEST_STEPS:
            few = f"request {id[:200]!r} is too old, or fewer than {FEWEST_STEPS} steps are measured. Send a load first"
            raise InferenceError("not_found_error", few)
        return requests


def latest(requests: list[Served], count: int) -> list[Served]:
    """Return the requests after the last pause, or the last `count` and those since the server was idle before them."""
    begin = max(0, len(requests) - count)
    for i in range(len(requests) - FEWEST_REQUESTS, begin, -1):
        if requests[i].alone and requests[i].at - requests[i - 1].at >= PAUSE:
            return requests[i:]
    return requests[max((i for i, one in enumerate(requests[: begin + 1]) if one.alone), default=begin) :]
