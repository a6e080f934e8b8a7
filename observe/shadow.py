"""A shadow of the server: what another policy would have made of the requests that it has just served.

It notes who came and how long each step took, in bounded memory, and every few seconds asks a process of its own at the
lowest priority (`simulate/shadow.py`): simulating here would take the GIL from the loop. Part of the composition
root: only `launch/engine.py` and tests import it. Nothing that goes wrong in it reaches anybody else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import policies
from batching import BatchingManager, Inference, outcome
from config import ROOT, Config, ConfigError
from scheduling.iteration import Iteration
from simulate import costs
from simulate.costs import Step
from simulate.recorded import size, step_of_record

log = logging.getLogger(__name__)

KEPT = 1000  # requests
SPAN = 600.0  # seconds
KEPT_STEPS = 128  # of each size: a quiet hour must not forget what a full batch costs
FEWEST = 10  # requests, and steps, to say something
EVERY = 5.0  # seconds between two answers, at least
SHARE = 0.1  # of one core at most
LIMIT = 120.0  # seconds for one answer
PIECE = 50  # rows turned into JSON at once: the loop wants the GIL
COMMAND = (sys.executable, "-m", "simulate.shadow")


def check(config: Config) -> None:
    """Raise ValueError when the settings ask for a shadow that cannot be."""
    if config.shadow_cost and not config.shadow:
        raise ConfigError(
            f"--shadow-cost is {config.shadow_cost!r}, but --shadow is not set. Name the policy to simulate, for example --shadow static"
        )
    if config.shadow:
        policies.get_policy(config.shadow, config.max_batch_size)
    if config.shadow_cost:
        costs.load(config.shadow_cost)


class Shadow:
    """Watches a manager's requests and steps, and says what `policy` would have made of them.

    `served` is the name by which the manager's policy can be made again, should that not be its own name.
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
        every: float = EVERY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self.cost = cost
        self._manager = manager
        self._first = (manager.policy_name, served or manager.policy_name)
        self._slots = slots
        self._command = command
        self._every = every
        self._clock = clock
        self._since = -1.0  # who came by then is not asked about
        self._open: dict[str, tuple[float, bool]] = {}  # when it came, and whether to an idle server
        self._done: deque[tuple[bool, tuple[Any, ...], list[bytes]]] = deque()
        self._steps: defaultdict[tuple[bool, int], deque[tuple[Step, float]]] = defaultdict(
            partial(deque, maxlen=KEPT_STEPS)
        )
        self._gaps: deque[float] = deque(maxlen=KEPT_STEPS)
        self._turned: float | None = None  # when the last step ended, if somebody stayed
        self._served = ""
        self._left = 0
        self._told: dict[str, Any] = self._nothing("waiting")
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._complained = self._blind = False

    def on_arrival(self, inference: Inference) -> None:
        """Note an arrival; called in the handlers' threads, one at a time."""
        self._open[inference.id] = (inference.sequence.arrived_at, not self._open)

    def observe(self, iteration: Iteration | None, left: list[Inference]) -> None:
        """Note a step and who left; called in the loop's thread."""
        if self._blind:
            return
        try:
            if iteration is not None:
                self._note_step(iteration)
            for inference in left:
                self._note_departure(inference)
        except Exception:
            self._blind = True
            self._complain("the shadow cannot read a record and stops recording")

    def _note_step(self, iteration: Iteration) -> None:
        if iteration.policy != self._served:  # what came before was served by another
            self._served, self._since = (iteration.policy, iteration.t if self._served else self._since)
            self._done.clear()
        if self._turned is not None:
            self._gaps.append(max(0.0, iteration.t - self._turned))
        stays = len(iteration.members) > len(iteration.left)
        self._turned = iteration.t + iteration.seconds if stays else None
        policy = self._manager.policy
        step = step_of_record(iteration, policy is not None and policy.padded)
        if step.tokens and iteration.seconds > 0:
            self._steps[size(step)].append((step, iteration.seconds))

    def _note_departure(self, inference: Inference) -> None:
        arrived, alone = self._open.pop(inference.id, (0.0, False))
        seq = inference.sequence
        if not seq.output_ids or arrived <= self._since:
            return
        whole = outcome(inference) in ("stop", "length") and seq.finished_at is not None
        latency = seq.finished_at - arrived if whole and seq.finished_at is not None else None
        row = (arrived, len(seq.prompt_ids), len(seq.output_ids), latency, seq.client, seq.priority, seq.deadline)
        if len(self._done) >= KEPT:
            # They go in order of their end: who came before one that has gone is not all here any more.
            self._since = max(self._since, self._done.popleft()[1][0])
        self._done.append((alone, row, seq.hashes))
        self._left += 1

    def report(self) -> dict[str, Any]:
        """Return what /stats says: the latest answer, or why there is none."""
        return {"policy": self.policy, **self._told}

    def _nothing(self, state: str) -> dict[str, Any]:
        return {"served": self._manager.policy_name, "state": state, "requests": 0}

    def start(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Begin to answer, in a thread of its own; `tell` is called with each report."""
        self._thread = threading.Thread(target=self._run, args=(tell,), name="shadow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more, and let the process end."""
        self._stopping.set()
        self._end_process()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self, tell: Callable[[dict[str, Any]], None]) -> None:
        pause, asked = self._every, 0
        while not self._stopping.wait(pause):
            if self._left == asked:
                continue
            asked, began = self._left, self._clock()
            try:
                if (found := self._ask()) is None:
                    continue
            except Exception as error:
                if self._stopping.is_set():
                    return
                self._complain("the shadow's process failed; --shadow gives no more results")
                found = {**self._nothing("failed"), "reason": str(error)[:300]}
                self._stopping.set()
                self._end_process()
            self._told = found
            tell(self.report())
            pause = max(self._every, (self._clock() - began) / SHARE)

    def _complain(self, text: str) -> None:
        if not self._complained:
            self._complained = True
            log.exception(text)

    def window(self) -> tuple[list[tuple[Any, ...]], list[list[bytes]], bool]:
        """Return the requests to ask about, their prompts' pages, and whether they begin at an idle server.

        All who came in that time and none else: up to the oldest that is still here, and if it can be had without
        losing half of them, from one that found nobody.
        """
        still = [arrived for arrived, _ in self._open.copy().values()]
        since = max(self._since, self._clock() - SPAN)
        end = min(still, default=float("inf"))
        seen = sorted((d for d in self._done.copy() if since < d[1][0] < end), key=lambda d: d[1][0])
        first = next((i for i, (alone, _, _) in enumerate(seen) if alone), len(seen))
        from_idle = bool(seen) and first <= len(seen) // 2
        kept = seen[first:] if from_idle else seen
        return [row for _, row, _ in kept], [hashes for _, _, hashes in kept], from_idle

    def _ask(self) -> dict[str, Any] | None:
        """Return an answer; None while too little has happened."""
        served = self._manager.policy_name
        if served != self._served:  # it has just been changed, and has not decided yet
            return None
        rows, hashes, from_idle = self.window()
        steps = [row for kept in list(self._steps.values()) for row in kept.copy()]
        whole = sum(row[3] is not None for row in rows)
        if whole < FEWEST or len(steps) < FEWEST:
            return None
        process = self._process = self._process or self._begin_process()
        assert process.stdin is not None
        for line in self._lines(rows, hashes, steps):
            process.stdin.write(line)
        process.stdin.flush()
        told = json.loads(self._read(process))
        if "problem" in told:
            if not self._complained:
                self._complained = True
                log.warning("the shadow cannot simulate %s: %s", self.policy, told["problem"])
            return {**self._nothing("failed"), "reason": told["problem"]}
        span = rows[-1][0] - rows[0][0]
        return {"served": served, "state": "ready", **told, "seconds": span, "from_idle": from_idle}

    def _lines(
        self, rows: list[tuple[Any, ...]], hashes: list[list[bytes]], steps: list[tuple[Step, float]]
    ) -> Iterator[str]:
        names: dict[bytes, int] = {}  # numbers in place of long hashes
        requests = ((*row, [names.setdefault(page, len(names)) for page in pages]) for row, pages in zip(rows, hashes))
        for name, found in (("requests", requests), ("steps", ((*s, t) for s, t in steps))):
            piece: list[Any] = []
            for row in found:
                piece.append(row)
                if len(piece) == PIECE:
                    yield json.dumps({name: piece}) + "\n"
                    piece = []
            yield json.dumps({name: piece}) + "\n"
        yield json.dumps({"ask": self._facts()}) + "\n"

    def _facts(self) -> dict[str, Any]:
        manager = self._manager
        name, made_by = self._first
        served = made_by if manager.policy_name == name else manager.policy_name
        gaps = self._gaps.copy()
        pages = manager.pages
        kv = (pages.total, pages.page_size) if pages is not None else (0, 16)
        return {
            "shadow": [self.policy, {}],
            "served": [served, manager.policy_options],
            "machine": [self._slots or manager.max_batch_size, manager.max_tokens_per_step, *kv],
            "sigma": sum(gaps) / len(gaps) if gaps else 0.0,
            "cost": self.cost,
        }

    def _begin_process(self) -> subprocess.Popen[str]:
        # One thread of computing is enough, and none of its words are wanted: its answers say what is wrong.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            self._command, cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the server's terminal is not for it

        )  # fmt: skip

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], LIMIT)[0]:
            raise TimeoutError(f"timed out after {LIMIT:g} s")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process exited with status {process.wait(5)}")
        return line

    def _end_process(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    pipe and pipe.close()
