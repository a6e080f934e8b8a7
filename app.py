"""The composition root: it assembles settings, model, loop and HTTP, and does nothing else.

`./server.sh` runs `main` of `launch/command.py`, which checks the configuration, finds the model, and becomes gunicorn.
Gunicorn's single worker imports `app` from this module and starts the engine after the fork. This module may import everything; only
tests, benchmarks and gunicorn import it.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # The imports take a while, in which Ctrl-C would print a traceback.
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped before the start\n") and os._exit(130))
    from terminal import packages as packages  # isort: skip

    from launch import command

    command.main()
    sys.exit()

import gc
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flask import Flask

import config as settings
import policies
from api.admin import adapters, operations, policy
from api.application import assemble
from api.application import connect as connect
from api.dialects import batches, chat, embeddings, messages, native, ollama, openai, responses, tgi, tokens
from api.http.deferral import App
from api.in_process import InProcess, read_line
from api.pages import dashboard, docs, events
from api.schemas import body
from api.schemas.demo import LoadRequest
from api.service import LoadedEngine, Service
from batch_files.lines import Limits
from batch_files.runner import Runner
from batch_files.store import Store
from config import Config
from launch import banner
from launch.command import main as main
from launch.engine import engine_stack, load_engine
from serving.text_watch import TEXT_SECONDS, TextWatch
from serving.watchdog import Watchdog

log = logging.getLogger("effective-batching")

# The load that --demo starts. Twice as many users as slots: under every policy some wait, and a static batch is always
# full.
DEMO_LOAD = LoadRequest(users=16, pause=0.4, min_tokens=8, max_tokens=48, seed=1, replace=True)


def __getattr__(name: str) -> Any:
    """Create `app` when gunicorn reads it, so that importing this module does no work."""
    if name != "app":
        raise AttributeError(f"module 'app' has no attribute {name!r}")
    app = globals()["app"] = create_app(settings.load().config)

    def start_once() -> None:
        if "load-model" not in app.extensions:  # a bare `gunicorn app:app` has not started the engine before
            start(app)

    app.before_request(start_once)
    return app


def create_app(config: Config, engine: LoadedEngine | None = None) -> Flask:
    """Return the Flask app; without an `engine` it answers 503 until `start` has loaded one."""
    app = App("effective-batching", static_folder=None)
    service = Service(config, policies)
    app.extensions["start"] = partial(start, app)  # for gunicorn's worker, whose configuration imports no app
    if config.batch_folder:
        service.batches = batch_runner(app, service)
    modules = (
        native, openai, chat, messages, responses, embeddings, batches, tgi, ollama, tokens, adapters, operations, policy,
        events, dashboard, docs,
    )  # fmt: skip
    assemble(app, service, modules)
    if engine is not None:
        connect(service, engine)
    return app


def begin_demo(service: Service, engine: LoadedEngine) -> None:
    """Start the policy and the load of the demonstration, which has no end: at first, and after a tour that was killed."""
    config, load = service.config, service.load
    if service.draining:
        return
    load.left = partial(begin_demo, service, engine)
    policy = policies.get_policy(config.policy, config.max_batch_size, config.policy_options)
    engine.manager.inbox.switch(policy, timeout=service.stall_seconds)
    load.start(engine, DEMO_LOAD, service.wants_load)


def batch_runner(app: App, service: Service) -> Runner:
    """Return what computes batches by requests of this app to itself."""
    config = service.config
    return Runner(
        Store(Path(config.batch_folder)),
        InProcess(app, service),
        max_lines=config.batch_lines,
        lines=Limits(body.LIMIT, read_line),
        retention=config.batch_retention * 3600,
        is_ready=lambda: service.status()[0] == "ok" and not service.draining,
        width=config.batch_width,
    )


def start(
    app: Flask,
    on_failure: Callable[[Exception], None] = lambda error: None,
    on_death: Callable[[str], None] = lambda reason: None,
    on_ready: Callable[[], None] = lambda: None,
    on_load: Callable[[LoadedEngine], None] = lambda engine: None,
) -> threading.Thread:
    """Load the model and run the loop, once, in the background; until then the app answers 503.

    `on_failure` is called with the error when the model cannot be loaded, `on_load` with the engine before any request
    reaches it, `on_ready` when it serves, and `on_death` with the reason when the loop fails later.
    """
    service: Service = app.extensions["service"]

    def load() -> None:
        began = time.perf_counter()
        try:
            engine = load_engine(service.config, on_death)
            on_load(engine)
            connect(service, engine)
        except Exception as error:  # the server must report any failure instead of loading forever
            if not isinstance(error, (ValueError, OSError, MemoryError, RuntimeError)):
                log.exception("loading the model failed with an unexpected error")
            service.failure = str(error) or type(error).__name__
            banner.fail(service.failure)
            on_failure(error)
            return
        Watchdog(engine.manager, service.stall_seconds).start()
        limit = min(TEXT_SECONDS, service.stall_seconds)
        service.texts = TextWatch(lambda: engine.tokenizer.oldest_call, engine.manager, limit)
        service.texts.start()
        gc.collect()
        gc.freeze()  # the model never becomes garbage: exclude it from collection
        if service.config.demo:
            begin_demo(service, engine)
        banner.show(service.config, engine, time.perf_counter() - began)
        on_ready()

    thread = threading.Thread(target=load, name="load-model", daemon=True)
    started: threading.Thread = app.extensions.setdefault("load-model", thread)  # atomic: the first caller's stays
    if started is thread:
        with engine_stack():
            thread.start()
    return started
