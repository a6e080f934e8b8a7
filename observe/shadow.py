"""The shadow policy: how another policy would have served the requests that the server has just served.

It records arrivals and the time of each step in bounded memory. Every few seconds it sends them to a process of its own
at the lowest priority (`simulate/shadow.py`): simulating in this process would take the GIL from the loop. Part of the
composition root: only `launch/engine.py` and tests import it. Its failures affect nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import policies
from batching import BatchingManager, Inference, outcome
from config import ROOT, Config, ConfigError
from scheduling.iteration import Iteration
from simulate import costs
from simulate.steps import Step, size, step_of_members

log = logging.getLogger(__name__)

MAX_REQUESTS = 1000
MAX_AGE = 600.0  # seconds since a request arrived
STEPS_PER_SIZE = 128  # the latest of each size: a quiet hour must not push out the cost of a full batch
MINIMUM = 10  # requests, and steps, for a first report
INTERVAL = 5.0  # seconds between two reports, at least
MAX_LOAD = 0.1  # of one core
TIMEOUT = 120.0  # seconds for one answer of the process
ROWS_PER_LINE = 50  # of JSON encoded at once, because the loop needs the GIL
COMMAND = (sys.executable, "-m", "simulate.shadow")

Row = tuple[Any, ...]  # arrival, prompt tokens, output tokens, latency or None, client, priority, deadline, open-ended


def check(config: Config) -> None:
    """Raise ValueError if the settings for the shadow cannot work."""
    if config.shadow_cost and not config.shadow:
        raise ConfigError(
            f"--shadow-cost is {config.shadow_cost!r}, but --shadow is not set. Name the policy to simulate, for example --shadow static"
        )
    if config.shadow:
        policies.get_policy(config.shadow, config.max_batch_size)
    if config.shadow_cost:
        costs.load(config.shadow_cost)


class SimulatorProcess:
    """The process that simulates; it starts with the first question."""

    def __init__(self, command: Rows[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def ask(self, lines: Iterable[str]) -> dict[str, Any]:
        """Send these lines and return the answer; raise OSError, RuntimeError or ValueError if there is none."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.writelines(lines)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], TIMEOUT)[0]:
            raise TimeoutError(f"timed out after {TIMEOUT:g} s")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process exited with status {process.wait(5)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        # One compute thread is enough. Its stderr is not needed, because its answers contain errors.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            self._command, cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the server's terminal must not reach it
        )  # fmt: skip

    def end(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    pipe and pipe.close()


class Recording:
    """The latest requests and steps of a server, as far as one policy served them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy = ""  # that made the latest step
        self.departures = 0
        self._clock = clock
        self._since = -1.0  # requests that arrived earlier are left out
        self._open: dict[str, tuple[float, bool]] = {}  # arrival, and whether the server was idle
        self._done: deque[tuple[bool, Row, list[bytes]]] = deque()
        self._steps: defaultdict[tuple[bool, int], deque[tuple[Step, float]]] = defaultdict(
            partial(deque, maxlen=STEPS_PER_SIZE)
        )
        self._gaps: deque[float] = deque(maxlen=STEPS_PER_SIZE)
        self._ended: float | None = None  # when the last step ended, if requests stayed in the batch

    def arrive(self, inference: Inference) -> None:
        self._open[inference.id] = (inference.sequence.arrived_at, not self._open)

    def step(self, iteration: Iteration, padded: bool) -> None:
        if iteration.policy != self.policy:  # another policy served the requests before
            self._since = iteration.t if self.policy else self._since
            self.policy = iteration.policy
            self._done.clear()
        if self._ended is not None:
            self._gaps.append(max(0.0, iteration.t - self._ended))
        stays = len(iteration.members) > len(iteration.left)
        self._ended = iteration.t + iteration.seconds if stays else None
        step = step_of_members(iteration.members, padded)
        if step.tokens and iteration.seconds > 0:
            self._steps[size(step)].append((step, iteration.seconds))

    def depart(self, inference: Inference) -> None:
        arrived, alone = self._open.pop(inference.id, (0.0, False))
        seq = inference.sequence
        if not seq.output_ids or arrived <= self._since:
            return
        complete = outcome(inference) in ("stop", "length") and seq.finished_at is not None
        latency = seq.finished_at - arrived if complete and seq.finished_at is not None else None
        lengths = len(seq.prompt_ids), len(seq.output_ids)
        row = (arrived, *lengths, latency, seq.client, seq.priority, seq.deadline, seq.open_ended)
        if len(self._done) >= MAX_REQUESTS:
            # Requests are dropped in the order of their end: some that arrived before this one may be missing.
            self._since = max(self._since, self._done.popleft()[1][0])
        self._done.append((alone, row, seq.hashes))
        self.departures += 1

    def window(self) -> tuple[list[Row], list[list[bytes]], bool]:
        """Return the requests to simulate, their pages, and whether they begin at an idle server.

        These are all requests that arrived in a span of time, up to the oldest one that is still open. The span begins
        with a request that found the server idle, if that leaves out less than half of them.
        """
        still_open = [arrived for arrived, _ in self._open.copy().values()]
        since = max(self._since, self._clock() - MAX_AGE)
        end = min(still_open, default=float("inf"))
        seen = sorted((d for d in self._done.copy() if since < d[1][0] < end), key=lambda d: d[1][0])
        first = next((i for i, (alone, _, _) in enumerate(seen) if alone), len(seen))
        from_idle = bool(seen) and first <= len(seen) // 2
        window = seen[first:] if from_idle else seen
        return [row for _, row, _ in window], [hashes for _, _, hashes in window], from_idle

    def steps(self) -> list[tuple[Step, float]]:
        return [row for steps in list(self._steps.values()) for row in steps.copy()]

    def mean_gap(self) -> float:
        """Return the mean time in seconds between two steps."""
        gaps = self._gaps.copy()
        return sum(gaps) / len(gaps) if gaps else 0.0


class Shadow:
    """Watches a manager's requests and steps, and reports how `policy` would have served them.

    `served` is the name under which the manager's policy can be created again, if that is not its own name.
    """

    def __init__(
        self,
        policy: str,
        manager: BatchingManager,
        *,
        served: str = "",
        slots: int = 0,
        cost: str = "",
        command: Rows[str] = COMMAND,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self.recording = Recording(clock)
        self.process = SimulatorProcess(command)
        self._cost = cost
        self._manager = manager
        self._first = (manager.policy_name, served or manager.policy_name)
        self._slots = slots
        self._interval = interval
        self._clock = clock
        self._report = self._empty("waiting")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_logged = self._is_blind = False

    def on_arrival(self, inference: Inference) -> None:
        """Record an arrival; called in the handlers' threads, one at a time."""
        self.recording.arrive(inference)

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Record a step and the requests that left; called in the loop's thread."""
        if self._is_blind:
            return
        try:
            if iteration is not None:
                policy = self._manager.policy
                self.recording.step(iteration, padded=policy is not None and policy.padded)
            for inference in left:
                self.recording.depart(inference)
        except Exception:
            self._is_blind = True
            self._log_once("the shadow cannot read a record and stops recording", error=True)

    def report(self) -> dict[str, Any]:
        """Return the shadow's part of /stats: the latest answer, or why there is none."""
        return {"policy": self.policy, **self._report}

    def _empty(self, state: str) -> dict[str, Any]:
        return {"served": self._manager.policy_name, "state": state, "requests": 0}

    def start(self, announce: Callable[[dict[str, Any]], None]) -> None:
        """Start to report, in a thread; `announce` is called with each report."""
        self._thread = threading.Thread(target=self._run, args=(announce,), name="shadow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting and end the process."""
        self._stopping.set()
        self.process.end()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self, announce: Callable[[dict[str, Any]], None]) -> None:
        pause, departures = self._interval, 0
        while not self._stopping.wait(pause):
            if self.recording.departures == departures:
                continue
            departures, began = self.recording.departures, self._clock()
            try:
                report = self._ask()
            except Exception as error:
                if self._stopping.is_set():
                    return
                self._log_once("the shadow's process failed; --shadow gives no more results", error=True)
                report = {**self._empty("failed"), "reason": str(error)[:300]}
                self._stopping.set()
                self.process.end()
            if report is None:
                continue
            self._report = report
            announce(self.report())
            pause = max(self._interval, (self._clock() - began) / MAX_LOAD)

    def _log_once(self, message: str, *args: str, error: bool = False) -> None:
        if not self._has_logged:
            self._has_logged = True
            log.log(logging.ERROR if error else logging.WARNING, message, *args, exc_info=error)

    def _ask(self) -> dict[str, Any] | None:
        """Return a report, or None while there is too little to simulate."""
        served = self._manager.policy_name
        if served != self.recording.policy:  # the policy was switched and has not made a step yet
            return None
        rows, hashes, from_idle = self.recording.window()
        steps = self.recording.steps()
        complete = sum(row[3] is not None for row in rows)
        if complete < MINIMUM or len(steps) < MINIMUM:
            return None
        answer = self.process.ask(self.question(rows, hashes, steps))
        if "problem" in answer:
            self._log_once("the shadow cannot simulate %s: %s", self.policy, answer["problem"])
            return {**self._empty("failed"), "reason": answer["problem"]}
        span = rows[-1][0] - rows[0][0]
        return {"served": served, "state": "ready", **answer, "seconds": span, "from_idle": from_idle}

    def question(self, rows: list[Row], hashes: list[list[bytes]], steps: list[tuple[Step, float]]) -> Iterator[str]:
        """Yield the lines that `simulate/shadow.py` reads: requests and steps in pieces, then what to simulate."""
        numbers: dict[bytes, int] = {}  # in place of long hashes
        requests = ((*row, [numbers.setdefault(p, len(numbers)) for p in pages]) for row, pages in zip(rows, hashes))
        for name, values in (("requests", requests), ("steps", ((*step, seconds) for step, seconds in steps))):
            while piece := list(itertools.islice(values, ROWS_PER_LINE)):
                yield json.dumps({name: piece}) + "\n"
        yield json.dumps({"ask": self._server()}) + "\n"

    def _server(self) -> dict[str, Any]:
        """Return what the simulation must know about the server."""
        manager = self._manager
        name, created_as = self._first
        served = created_as if manager.policy_name == name else manager.policy_name
        pages = manager.pages
        kv = (pages.total, pages.page_size) if pages is not None else (0, 16)
        return {
            "shadow": [self.policy, {}],
            "served": [served, manager.policy_options],
            "machine": [self._slots or manager.max_batch_size, manager.max_tokens_per_step, *kv],
            "sigma": self.recording.mean_gap(),
            "cost": self._cost,
        }
