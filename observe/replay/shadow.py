"""The shadow policy: how another policy would have served the requests that the server has just served.

Every few seconds it sends what was recorded (`observe/replay/recording.py`) to a process of its own at the lowest priority
(`simulate/measured/shadow.py`): simulating in this process would take the GIL from the loop. Its failures affect nothing else.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

from observe.replay.question import Server
from observe.replay.simulator_process import SimulatorProcess

log = logging.getLogger(__name__)

MINIMUM = 10  # requests, and steps, for a first report
INTERVAL = 5.0  # seconds between two reports, at least
MAX_LOAD = 0.1  # of one core
TIMEOUT = 120.0  # seconds for one answer of the process


class Shadow:
    """Reports how `policy` would have served the requests that `server` has served."""

    def __init__(
        self,
        policy: str,
        server: Server,
        *,
        command: Many[str] = (),
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self.process = SimulatorProcess("simulate.measured.shadow", timeout=TIMEOUT, command=command)
        self._server = server
        self._interval = interval
        self._clock = clock
        self._report = self._empty("waiting")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_logged = False

    def report(self) -> dict[str, Any]:
        """Return the shadow's part of /stats: the latest answer, or why there is none."""
        return {"policy": self.policy, **self._report}

    def _empty(self, state: str) -> dict[str, Any]:
        return {"served": self._server.manager.policy_name, "state": state, "requests": 0}

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
        pause, departures, recording = self._interval, 0, self._server.recording
        while not self._stopping.wait(pause):
            if recording.departures == departures:
                continue
            departures, began = recording.departures, self._clock()
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
        recording, served = self._server.recording, self._server.manager.policy_name
        if served != recording.policy:  # the policy was switched and has not made a step yet
            return None
        requests, from_idle = recording.window()
        complete = sum(one.latency is not None for one in requests)
        if complete < MINIMUM or len(recording.steps()) < MINIMUM:
            return None
        answer = json.loads(self.process.ask(self._server.question(requests, shadow=[self.policy, {}])))
        if "problem" in answer:
            reason = answer["problem"].removeprefix("PolicyFailed: ")
            self._log_once("the shadow cannot simulate %s: %s", self.policy, reason)
            return {**self._empty("failed"), "reason": reason}
        span = requests[-1].at - requests[0].at
        return {"served": served, "state": "ready", **answer, "seconds": span, "from_idle": from_idle}
