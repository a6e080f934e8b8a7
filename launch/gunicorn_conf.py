"""Gunicorn's configuration: one worker, because a second would have a second model and a second queue.

There is a thread for each open request, and a reserve, so that HTTP never limits the batch. The engine starts after
the fork, because neither threads nor a GPU's state survive one.
"""

import gc

gc.disable()  # imports make much that stays, and little garbage

import logging
import math
import mmap
import signal
import sys
import time
from importlib import import_module
from typing import Any

import config as settings
from launch import banner, status_line
from launch.shutdown import QUICK_SECONDS
from launch.worker import connections, handover
from launch.worker.engine_process import EngineProcess
from serving.watchdog import RestartLimiter

SILENT_SECONDS = 10.0  # between two heartbeats of a worker, which has one in each second

_config = settings.load().config
# Created in the master, so that its workers share them.
_restart_limiter, _handover, _device_error = RestartLimiter(), handover.shared(), mmap.mmap(-1, 1024)
_channel: Any = None  # of a server with front ends
if _config.front_ends:
    from launch.front_ends.channel import Channel

    _channel = Channel(_config.front_ends)

bind = _config.address
workers = 1 + _config.front_ends
worker_class = "launch.worker.worker.Worker"
threads = _config.threads
worker_connections = _config.connections
timeout = 120  # of the worker's own heartbeat, not of a request
graceful_timeout = int(_config.request_timeout) + 10
keepalive = 75
loglevel = "warning"
proc_name = "effective-batching"
control_socket_disable = True


def on_starting(server: Any) -> None:
    """Import what a worker starts by name, before the fork; reject GUNICORN_CMD_ARGS that cannot work."""
    import_module(server.app.app_uri.partition(":")[0])
    gc.enable()
    logging.getLogger("gunicorn.error").addFilter(_is_worth_logging)
    cfg = server.cfg
    own = cfg.workers == workers and not cfg.preload_app and cfg.worker_class_str == worker_class
    if not own or cfg.threads < threads or cfg.worker_connections < worker_connections:
        banner.fail(
            f"GUNICORN_CMD_ARGS changes the worker, or leaves fewer than {threads} threads or {worker_connections} "
            "connections, which the settings need. Unset it; use --max-queue and --max-connections"
        )
        sys.exit(2)
    if _config.front_ends and not connections.is_plain(cfg):
        banner.fail("front ends speak neither TLS nor HTTP/2. Let a proxy do that, or leave out --front-ends")
        sys.exit(2)


def when_ready(server: Any) -> None:
    """Limit how long a client may block a thread, and handle signals to shut down."""
    gc.freeze()  # what was imported stays: no search for garbage looks at it again, and the end of a process has several
    for listener in server.LISTENERS:
        connections.limit_blocking(listener.sock, _config.receive_timeout, _config.send_timeout)
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


def on_reload(server: Any) -> None:
    """Close what the configurations before the last one have shared, before processes inherit it."""
    gc.collect()


def pre_fork(server: Any, worker: Any) -> None:
    """Decide which worker is the engine's process."""
    if _channel is not None:
        _channel.cast(worker, server.WORKERS.values())


def post_worker_init(worker: Any) -> None:
    """Start the engine in the worker process."""
    kind = EngineProcess
    if _channel is not None:
        from launch.front_ends.process import ComputingProcess, FrontProcess

        kind = FrontProcess if worker.number else ComputingProcess
    kind(worker, _handover, _restart_limiter, _device_error).start()


def worker_exit(server: Any, worker: Any) -> None:
    """Flush the access log, and clear the status line for the shell."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        sys.__stdout__.write(status_line.CLEAR)
        sys.__stdout__.flush()
    app = getattr(worker, "wsgi", None)
    if app is not None:
        app.extensions["service"].access_log.flush()
