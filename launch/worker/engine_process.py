"""Start the engine in a worker's process, and end that process when the engine fails."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import threading
import time
from typing import Any

from gunicorn import util

import config as settings
from api.http import large
from api.service import LoadedEngine, Service
from generate.cores import cores
from launch import plugin, status_line
from launch.one_core import OneCore
from launch.worker.connections import http_date, write_error
from launch.worker.handover import Handover
from observe.queued_log import QueuedHandler, QueuedLog
from serving.recovery import blames_kernels
from serving.watchdog import FAILURE_SECONDS, MAX_FAILURES, RestartLimiter

ANSWER_SECONDS = 1.0  # to answer the open requests of a failed engine


class EngineProcess:
    """The process of one worker; its last three arguments are shared with the workers before and after it."""

    def __init__(self, worker: Any, handover: Handover, limiter: RestartLimiter, device_error: mmap.mmap) -> None:
        self._worker, self._limiter, self._device_error = worker, limiter, device_error
        worker.handover = handover
        self._service: Service = worker.app.callable.extensions["service"]
        self._service.deaths = lambda: limiter.count

    def start(self) -> None:
        """Prepare the process, and load the model in the background."""
        sys.setswitchinterval(2e-4)  # the loop needs the GIL back sooner than after 5 ms
        threading.stack_size(512 * 1024)
        util.write_error, util.http_date = write_error, http_date
        self._avoid_failed_kernels()
        self._queue_logs()
        self._service.completer.start()
        self._service.socket_writer.start()
        self._load()

    def _load(self) -> None:
        if not self._service.serves:
            status_line.start(self._terminal, self._service.meters, lambda: self._service.engine)
        self._worker.app.callable.extensions["start"](self._give_up, self._end, self._begin, self._connect)

    def _avoid_failed_kernels(self) -> None:
        """Do without fast kernels if the engine before failed in them."""
        self._failed = self._device_error[:].rstrip(b"\0").decode("utf-8", "replace")
        if self._failed:
            os.environ.update({"EB_KERNELS": "off", settings.DEVICE_ERROR: self._failed})

    def _queue_logs(self) -> None:
        """Write logs in threads, as a reader that does not drain stderr must not block the loop.

        Where a person looks, a status line takes the place of the access log.
        """
        armed = plugin.read(os.environ)
        self._errors = QueuedLog(armed.stream(sys.stderr))
        self._errors.start()
        self._service.access_log = QueuedLog(armed.stream(sys.stdout))
        self._service.access_log.start()
        logging.basicConfig(handlers=[QueuedHandler(self._errors)], level=logging.WARNING)
        self._terminal, sys.stdout = sys.stdout, sys.stderr  # what a policy prints is no access log
        self._service.serves = not self._terminal.isatty() or os.environ.get("TERM") == "dumb"

    def _connect(self, engine: LoadedEngine) -> None:
        """Prepare an engine that no request has reached."""

    def _begin(self) -> None:
        """Answer the requests of the engine before."""
        self._worker.method_queue.defer(self._worker.adopt)
        self._use_one_core()

    def _use_one_core(self) -> None:
        """Keep Python's threads on one processor, where that is possible."""
        # Not before: a model is loaded, and its threads are counted, on all processors.
        cores()
        # What OneCore raises where it is not supported, such as on macOS.
        with contextlib.suppress(AttributeError, OSError, ValueError, LookupError):
            core = OneCore()
            if len(core.all) > 1:
                core.start()
                large.compute_in(core.elsewhere)

    def _give_up(self, error: Exception) -> None:
        """Exit because the model cannot be loaded."""
        again = self._does_without_kernels(error)
        if self._failed and not again:  # no engine will answer the requests that were handed over
            self._worker.method_queue.defer(self._worker.adopt)
            time.sleep(ANSWER_SECONDS)
        self._errors.flush()
        os._exit(70 if again else 3)  # 3: no retry, as a model that cannot be loaded will not load the next time either

    def _end(self, reason: str) -> None:
        """Exit after the engine has failed: gunicorn restarts the worker, unless there were too many failures."""
        engine, errors = self._service.engine, self._errors
        again = engine is not None and self._does_without_kernels(engine.manager.recovery.fatal)
        too_often = self._limiter.add() and not again
        errors.write(f"error: the engine failed: {reason}")  # in its own thread, because stderr may block
        end = time.monotonic() + ANSWER_SECONDS
        time.sleep(ANSWER_SECONDS / 3)  # handlers need a moment to write the errors
        while self._service.registry.open and time.monotonic() < end:
            time.sleep(0.02)
        if too_often:
            errors.write(
                f"error: the engine failed {MAX_FAILURES} times within {FAILURE_SECONDS:g} s, so it is not restarted. "
                "See the errors above"
            )
        self._worker.handover.send()
        errors.flush()
        os._exit(3 if too_often else 70)

    def _does_without_kernels(self, error: BaseException | None) -> bool:
        """Return whether fast kernels may be at fault; the next worker then runs without them."""
        if not blames_kernels(error):
            return False
        text = str(error).strip().splitlines()[0].encode()[: len(self._device_error)]
        self._device_error[: len(text)] = text
        self._errors.write(
            "warning: the engine starts again without fast kernels (EB_KERNELS=off), which is much slower"
        )
        return True
