"""How gunicorn serves the app: one worker, since a second would be a second model with a second queue.

Threads are as many as requests may be open, and a reserve, so that the HTTP side never caps the batch. The engine
starts after the fork: neither threads nor a GPU's state survive one.
"""

import logging
import os
import sys
import threading
from typing import Any

import app as application
import banner
import config as settings
import faults
from api.access_log import AccessLog, QueuedHandler
from worker import limit_waiting

_config = settings.load().config

bind = (
    f"[{_config.host}]:{_config.port}" if ":" in _config.host else f"{_config.host}:{_config.port}"
)
workers = 1
worker_class = "worker.Worker"
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
    """Refuse what flags of gunicorn or GUNICORN_CMD_ARGS would break."""
    logging.getLogger("gunicorn.error").addFilter(_is_news)
    cfg = server.cfg
    if cfg.workers != 1 or cfg.preload_app or cfg.worker_class_str != worker_class:
        banner.fail(
            f"gunicorn was told {cfg.workers} workers of class {cfg.worker_class_str}, preload "
            f"{'on' if cfg.preload_app else 'off'}. Only 1 worker of ours without preload serves one model "
            "with one queue: take the flags out of GUNICORN_CMD_ARGS"
        )
        sys.exit(2)
    if cfg.threads < threads or cfg.worker_connections < worker_connections:
        banner.fail(
            f"gunicorn was told {cfg.threads} threads and {cfg.worker_connections} connections, and the settings "
            f"need {threads} and {worker_connections}. Set --max-queue and --max-connections instead"
        )
        sys.exit(2)


def when_ready(server: Any) -> None:
    """Bound how long a client may keep a thread waiting, before anybody is let in."""
    for listener in server.LISTENERS:
        limit_waiting(listener.sock, _config.receive_timeout, _config.send_timeout)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of gunicorn's says more than ours, and is not of a client that was too slow."""
    if record.exc_info and isinstance(record.exc_info[1], BlockingIOError):
        return False
    text = record.getMessage()
    ending = ("Shutting down: Master", "Reason: Worker failed to boot.")
    return text not in ending and not text.endswith("exited with code 3.")


def post_worker_init(worker: Any) -> None:
    """Start the engine in the process that serves."""
    sys.setswitchinterval(2e-4)  # the loop wants the GIL back sooner than after 5 ms
    threading.stack_size(512 * 1024)
    service = worker.app.callable.extensions["service"]
    service.serves = True
    # Whoever does not read our stderr must not stop the loop when it has something to say.
    armed = faults.read(os.environ)
    said = AccessLog(armed.stream(sys.stderr))
    service.access_log = AccessLog(armed.stream(sys.stdout))
    logging.basicConfig(handlers=[QueuedHandler(said)], level=logging.WARNING)

    def give_up() -> None:
        said.flush()
        os._exit(3)

    # 3 tells gunicorn not to try again: a model that cannot be loaded will not load the next time either.
    application.start(worker.app.callable, on_failure=give_up)


def worker_exit(server: Any, worker: Any) -> None:
    """Let the last lines of the access log out."""
    app = getattr(worker, "wsgi", None)
    if app is not None:
        app.extensions["service"].access_log.flush()
