"""How gunicorn serves the app: one worker, since a second would be a second model with a second queue.

Threads are as many as requests may be open, and a reserve, so that the HTTP side never caps the batch. The engine
starts after the fork: neither threads nor a GPU's state survive one.
"""

import os
import sys
import threading

import app as application
import config as settings

_config = settings.load().config

bind = (
    f"[{_config.host}]:{_config.port}" if ":" in _config.host else f"{_config.host}:{_config.port}"
)
workers = 1
worker_class = "gthread"
threads = _config.threads
worker_connections = _config.threads + 512
backlog = 2048
timeout = 120  # of the worker's own heartbeat, not of a request
graceful_timeout = int(_config.request_timeout) + 10
keepalive = 75
preload_app = False
max_requests = 0
loglevel = "warning"
proc_name = "effective-batching"
control_socket_disable = True


def post_worker_init(worker):
    sys.setswitchinterval(2e-4)  # the loop wants the GIL back sooner than after 5 ms
    threading.stack_size(512 * 1024)
    # 3 tells gunicorn not to try again: a model that cannot be loaded will not load the next time either.
    application.start(worker.app.callable, on_failure=lambda: os._exit(3))
