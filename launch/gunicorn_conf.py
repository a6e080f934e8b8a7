"""Gunicorn's configuration: one worker, because a second would have a second model and a second queue.

There is a thread for each open request, and a reserve, so that HTTP never limits the batch. The engine starts after
the fork, because neither threads nor a GPU's state survive one.
"""

import gc

gc.disable()  # imports make much that stays, and little garbage

import contextlib
import logging
import math
import mmap
import os
import signal
import sys
import threading
import time
from functools import partial
from importlib import import_module
from typing import Any

from gunicorn import util

import config as settings
from api.http import large
from api.service import Service
from generate.cores import cores
from launch import banner, plugin, status_line
from launch.one_core import OneCore
from launch.shutdown import QUICK_SECONDS
from launch.worker import handover
from launch.worker.connections import http_date, limit_blocking, write_error
from observe.queued_log import QueuedHandler, QueuedLog
from serving.recovery import blames_kernels
from serving.watchdog import FAILURE_SECONDS, MAX_FAILURES, RestartLimiter

import_module("app")  # which gunicorn starts by name in each worker: what it imports is there before the fork
gc.enable()
ANSWER_SECONDS = 1.0  # to answer the open requests of a failed engine
SILENT_SECONDS = 10.0  # between two heartbeats of a worker, which has one in each second

_config = settings.load().config
# Created in the master, so that its workers share them.
_restart_limiter, _handover, _device_error = RestartLimiter(), handover.shared(), mmap.mmap(-1, 1024)

bind = _config.address
workers = 1
worker_class = "launch.worker.worker.Worker"
threads = _config.threads
worker_connections = _config.connections
backlog = 2048
timeout = 120  # of the worker's own heartbeat, not of a request
graceful_timeout = int(_config.request_timeout) + 10
keepalive = 75
preload_app = False
max_requests = 0
loglevel = "warning"
proc_name = "effective-batching"
control_socket_disable = True


def on_starting(server: Any) -> None:
    """Reject gunicorn flags and GUNICORN_CMD_ARGS that cannot work."""
    logging.getLogger("gunicorn.error").addFilter(_is_worth_logging)
    cfg = server.cfg
    own = cfg.workers == 1 and not cfg.preload_app and cfg.worker_class_str == worker_class
    if not own or cfg.threads < threads or cfg.worker_connections < worker_connections:
        banner.fail(
            f"GUNICORN_CMD_ARGS changes the worker, or leaves fewer than {threads} threads or {worker_connections} "
            "connections, which the settings need. Unset it; use --max-queue and --max-connections"
        )
        sys.exit(2)


def when_ready(server: Any) -> None:
    """Limit how long a client may block a thread, and handle signals to shut down."""
    gc.freeze()  # what was imported stays: no search for garbage looks at it again, and the end of a process has several
    for listener in server.LISTENERS:
        limit_blocking(listener.sock, _config.receive_timeout, _config.send_timeout)
    shutdown = Shutdown(server)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, shutdown)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which app.py has blocked


class Shutdown:
    """Shut down the master: after all requests on a first SIGTERM, and at once on any other signal or without a heartbeat.

    gunicorn itself would wait for a reload first, drop a signal that arrives together with another, and ignore a second
    SIGTERM.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._has_begun = False

    def __call__(self, number: int, frame: Any) -> None:
        server = self._server
        for worker in list(server.WORKERS.values()):
            worker.age = server.worker_age  # a reload waits for older workers
        queued = [server.SIG_QUEUE.get_nowait() for _ in range(server.SIG_QUEUE.qsize())]
        for other in queued:
            if other != signal.SIGHUP:
                server.SIG_QUEUE.put_nowait(other)
        if self._has_begun or number != signal.SIGTERM or any(map(_is_silent, server.WORKERS.values())):
            number = signal.SIGQUIT
            server.cfg.set("graceful_timeout", math.ceil(QUICK_SECONDS))  # then it kills
            server.kill_workers(number)
        self._has_begun = True
        server.signal(number, frame)


def _is_silent(worker: Any) -> bool:
    """Return whether a worker has stopped its heartbeat, because a call in C keeps Python's lock: it can answer no request."""
    try:
        return time.monotonic() - float(worker.tmp.last_update()) > SILENT_SECONDS
    except (OSError, ValueError):  # it has ended and closed the file whose time is its heartbeat
        return False


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether a log line of gunicorn adds to ours and is not about a slow client."""
    if record.exc_info and isinstance(record.exc_info[1], BlockingIOError):
        return False
    text = record.getMessage()
    ending = ("Shutting down: Master", "Reason: Worker failed to boot.")
    return text not in ending and not text.endswith("exited with code 3.")


def post_worker_init(worker: Any) -> None:
    """Start the engine in the worker process."""
    sys.setswitchinterval(2e-4)  # the loop needs the GIL back sooner than after 5 ms
    threading.stack_size(512 * 1024)
    util.write_error, util.http_date = write_error, http_date
    service = worker.app.callable.extensions["service"]
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    service.serves = not on_terminal  # where a person looks, a status line takes the place of the access log
    service.deaths = lambda: _restart_limiter.count
    worker.handover = _handover
    if failed := _device_error[:].rstrip(b"\0").decode("utf-8", "replace"):
        os.environ.update({"EB_KERNELS": "off", settings.DEVICE_ERROR: failed})
    # A reader that does not drain stderr must not block the loop when it logs.
    armed = plugin.read(os.environ)
    errors = QueuedLog(armed.stream(sys.stderr))
    errors.start()
    service.access_log = QueuedLog(armed.stream(sys.stdout))
    service.access_log.start()
    terminal, sys.stdout = sys.stdout, sys.stderr  # what a policy prints is no access log
    if on_terminal:
        status_line.start(terminal, service.meters, lambda: service.engine)
    service.completer.start()
    logging.basicConfig(handlers=[QueuedHandler(errors)], level=logging.WARNING)

    def give_up(error: Exception) -> None:
        again = _does_without_kernels(error, errors)
        if failed and not again:  # no engine will answer the requests that were handed over
            worker.method_queue.defer(worker.adopt)
            time.sleep(ANSWER_SECONDS)
        errors.flush()
        os._exit(70 if again else 3)  # 3: no retry, as a model that cannot be loaded will not load the next time either

    def begin() -> None:
        worker.method_queue.defer(worker.adopt)
        _share_one_core()  # not before: a model is loaded, and its threads are counted, on all processors

    worker.app.callable.extensions["start"](give_up, partial(_end, worker, errors), begin)


def _share_one_core() -> None:
    """Keep Python's threads on one processor, where that is possible."""
    cores()  # counted while this thread may use all
    with contextlib.suppress(AttributeError, OSError, ValueError, LookupError):  # as OneCore raises, such as on macOS
        core = OneCore()
        if len(core.all) > 1:
            core.start()
            large.elsewhere = core.elsewhere


def _does_without_kernels(error: BaseException | None, errors: QueuedLog) -> bool:
    """Return whether fast kernels may be at fault; the next worker then runs without them."""
    if not blames_kernels(error):
        return False
    text = str(error).strip().splitlines()[0].encode()[: len(_device_error)]
    _device_error[: len(text)] = text
    errors.write("warning: the engine starts again without fast kernels (EB_KERNELS=off), which is much slower")
    return True


def _end(worker: Any, errors: QueuedLog, reason: str) -> None:
    """Exit after the engine has failed: gunicorn restarts the worker, unless there were too many failures."""
    service: Service = worker.app.callable.extensions["service"]
    engine = service.engine
    again = engine is not None and _does_without_kernels(engine.manager.recovery.fatal, errors)
    too_often = _restart_limiter.add() and not again
    errors.write(f"error: the engine failed: {reason}")  # in its own thread, because stderr may block
    end = time.monotonic() + ANSWER_SECONDS
    time.sleep(ANSWER_SECONDS / 3)  # handlers need a moment to write the errors
    while service.registry.open and time.monotonic() < end:
        time.sleep(0.02)
    if too_often:
        errors.write(
            f"error: the engine failed {MAX_FAILURES} times within {FAILURE_SECONDS:g} s, so it is not restarted. "
            "See the errors above"
        )
    worker.handover.send()
    errors.flush()
    os._exit(3 if too_often else 70)


def worker_exit(server: Any, worker: Any) -> None:
    """Flush the access log, and clear the status line for the shell."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        sys.__stdout__.write(status_line.CLEAR)
        sys.__stdout__.flush()
    app = getattr(worker, "wsgi", None)
    if app is not None:
        app.extensions["service"].access_log.flush()
