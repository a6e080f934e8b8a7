"""The composition root: it assembles settings, model, loop and HTTP, and does nothing else.

`./server.sh` runs `main`, which checks the configuration, finds the model, and becomes gunicorn. Gunicorn's single
worker imports `app` from this module and starts the engine after the fork. This module may import everything; only
tests, benchmarks and gunicorn import it.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # the imports take a second or more, in which Ctrl-C would print a traceback
    signal.signal(signal.SIGINT, lambda *_: os.write(2, b"stopped before the start\n") and os._exit(130))

import dataclasses
import gc
import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Flask, Response
from flask.json.provider import DefaultJSONProvider
from werkzeug.exceptions import HTTPException

import config as settings
import policies
from api import dashboard, docs, events, operations, policy
from api.dialects import chat, native, openai, tgi, tokens
from api.http import admission, auth, cors, errors, middleware
from api.http.deferral import App
from api.service import Engine, Service
from client.shell import printing
from config import Config
from launch import banner, demo, doctor, faults, preflight
from launch.engine import engine_stack, load_engine
from launch.load_model import RESOLVED
from models import catalog
from observe import shadow
from scheduling.renamed import RenamedWarning
from serving.headroom import NO_MEMORY
from serving.watchdog import Watchdog
from simulate import mock

PROCESS = {
    # Otherwise glibc gives each thread its own heap, which never shrinks below its largest request.
    "MALLOC_ARENA_MAX": "2",
    # Otherwise macOS ends a process that gunicorn has forked when it first looks for a proxy.
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
}
NO_POLICY = (
    "no policy was named, so this serves nobatch, one request at a time, as the original did. "
    "./server.sh dynamic batches requests"
)
log = logging.getLogger("effective-batching")


def __getattr__(name: str) -> Any:
    """Create `app` when gunicorn reads it, so that importing this module does no work."""
    if name != "app":
        raise AttributeError(f"module 'app' has no attribute {name!r}")
    app = globals()["app"] = create_app(settings.load().config)

    def start_once() -> None:
        start(app)  # ./server.sh has started the engine by now, but a bare `gunicorn app:app` has not

    app.before_request(start_once)
    return app


def create_app(config: Config, engine: Engine | None = None) -> Flask:
    """Return the Flask app; without an `engine` it answers 503 until `start` has loaded one."""
    app = App("effective-batching", static_folder=None)
    app.url_map.merge_slashes = False  # do not redirect paths with double slashes
    app.config["TRUSTED_HOSTS"] = config.hosts
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # OPTIONS is a method of CORS alone
    app.json = Json(app)
    service = Service(config, policies)
    app.extensions["service"] = service
    if engine is not None:
        connect(service, engine)
    modules = (native, openai, chat, tgi, tokens, operations, policy, events, dashboard, docs)
    service.operations = [operation for module in modules for operation in module.OPERATIONS]
    app.before_request(middleware.enter)
    cors.install(app, config.origins)
    app.before_request(auth.check(config.api_key))
    app.before_request(admission.check(service))
    app.after_request(middleware.leave(service))
    app.teardown_request(middleware.abandon(service))
    for module in modules:
        app.register_blueprint(module.blueprint(service))
    app.register_error_handler(errors.ApiError, errors.response)
    app.register_error_handler(HTTPException, lambda e: errors.response(errors.from_http(e)))
    app.register_error_handler(MemoryError, _out_of_memory)
    app.register_error_handler(Exception, _unexpected)
    return app


def connect(service: Service, engine: Engine) -> None:
    """Serve with this engine: set its time limits, and connect its loop to all recorders of requests and steps."""
    manager = engine.manager
    manager.deadlines.queue_timeout = service.config.queue_limit
    manager.deadlines.request_timeout = service.config.request_timeout
    manager.listeners += [service.requests.on_arrival, service.meters.on_arrival, service.feed.on_arrival]
    manager.observers += [
        service.requests.observe,
        service.meters.observe,
        service.feed.observe,
        service.socket_writer.observe,
    ]
    if engine.shadow is not None:
        engine.shadow.start(lambda report: service.feed.announce("shadow", report))
    service.requests.waited = manager.waited
    service.engine = engine


class Json(DefaultJSONProvider):
    """Compact JSON with keys in insertion order, and without NaN, which is not valid JSON."""

    def __init__(self, app: Flask) -> None:
        super().__init__(app)
        self._encode = json.JSONEncoder(default=self.default, allow_nan=False, separators=(",", ":")).encode

    def dumps(self, obj: Any, **options: Any) -> str:
        return self._encode(obj)

    def response(self, *args: Any, **kwargs: Any) -> Response:
        obj = self._prepare_response_obj(args, kwargs)
        return Response(self._encode(obj) + "\n", content_type="application/json")


def _out_of_memory(error: MemoryError) -> Any:
    log.error("a request handler ran out of memory")
    return errors.response(errors.ApiError(NO_MEMORY, type="out_of_memory", code="out_of_memory"))


def _unexpected(error: Exception) -> Any:
    log.exception("a request handler failed")
    return errors.response(errors.ApiError("internal error on this request. Try another request", type="server_error"))


def start(
    app: Flask, on_failure: Callable[[], None] = lambda: None, on_death: Callable[[str], None] = lambda reason: None
) -> threading.Thread:
    """Load the model and run the loop, once, in the background; until then the app answers 503.

    `on_failure` is called when the model cannot be loaded, and `on_death` with the reason when the loop fails later.
    """
    service: Service = app.extensions["service"]

    def load() -> None:
        began = time.perf_counter()
        try:
            engine = load_engine(service.config, on_death)
            connect(service, engine)
        except Exception as error:  # the server must report any failure instead of loading forever
            if not isinstance(error, (ValueError, OSError, MemoryError, RuntimeError)):
                log.exception("loading the model failed with an unexpected error")
            service.failure = str(error) or type(error).__name__
            banner.fail(service.failure)
            on_failure()
            return
        Watchdog(engine.manager, service.stall_seconds).start()
        gc.collect()
        gc.freeze()  # the model never becomes garbage: exclude it from collection
        if service.config.demo:
            demo.begin(service)
        banner.show(service.config, engine, time.perf_counter() - began)

    thread = threading.Thread(target=load, name="load-model", daemon=True)
    started: threading.Thread = app.extensions.setdefault("load-model", thread)  # atomic: the first caller's stays
    if started is thread:
        with engine_stack():
            thread.start()
    return started


def main(argv: list[str] | None = None) -> None:
    """Check the settings, find the model, and become the server."""
    warnings.simplefilter("once", RenamedWarning)
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["doctor"]:
        argv = ["--doctor", *argv[1:]]
    if argv[:1] == ["demo"]:
        argv = ["--demo", *argv[1:]]
    if "--demo" in argv and argv[argv.index("--demo") + 1 :][:1] not in (["on"], ["off"]):
        argv = [*argv[: argv.index("--demo")], "--demo", "on", *argv[argv.index("--demo") + 1 :]]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loaded = settings.load(argv, policies={name: policies.summary(name) for name in policies.names()})
        chosen = loaded.config
        policies.get_policy(chosen.policy, chosen.max_batch_size, chosen.policy_options)
        shadow.check(chosen)
        if "--print-config" in argv:
            with printing():
                print(settings.describe(loaded))  # noqa: T201
            return
        for warning in loaded.warnings:
            banner.warn(warning)
        if armed := faults.read(os.environ).armed:
            banner.warn(f"{faults.VARIABLE} arms faults: {', '.join(armed)}. Unset it to serve")
        config = _with_absolute_paths(loaded.config)
        if "--doctor" in argv:
            raise SystemExit(0 if doctor.examine(config) else 1)
        preflight.check(config)
        # A download must take its unfinished files and pip with it: until gunicorn comes, SIGTERM would leave both.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        resolved = _resolve(config)
    except (ValueError, OSError) as error:
        banner.fail(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        banner.fail("stopped before the model was found. Start again to serve it")
        raise SystemExit(130) from None
    if loaded.origin["policy"] == "default":
        banner.note(NO_POLICY)
    environment = {**PROCESS, **os.environ, **config.to_environment(), RESOLVED: resolved, "BATCHING": config.policy}
    root = str(settings.ROOT)
    os.chdir(root)
    command = [sys.executable, "-m", "gunicorn", "--config", f"{root}/gunicorn_conf.py", "app:app"]
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until gunicorn handles it, in `when_ready`
    try:
        os.execve(sys.executable, command, environment)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _resolve(config: Config) -> str:
    """Find the model, with a note if that takes over a second; return its description for the worker."""
    if mock.is_mock(config.model):
        mock.load(config.model)  # the worker loads it again; this reports its errors in time
        return ""
    name = config.model or catalog.DEFAULT
    timer = threading.Timer(1.0, lambda: banner.note(f"looking for {name} on the model hub ..."))
    if catalog.is_on_hub(name):
        timer.start()
    try:
        return catalog.resolve(config.model or None, config.load_format).to_json()
    finally:
        timer.cancel()


def _with_absolute_paths(config: Config) -> Config:
    """Return the settings with absolute paths, since gunicorn runs in the folder of this file."""
    file, cost = config.tokenizer_file, config.shadow_cost
    return dataclasses.replace(
        config,
        tokenizer_file=str(Path(file).expanduser().absolute()) if file else "",
        model=mock.absolute(config.model) if mock.is_mock(config.model) else config.model,
        policy=policies.absolute(config.policy),
        shadow=policies.absolute(config.shadow) if config.shadow else "",
        shadow_cost=str(Path(cost).expanduser().absolute()) if cost else "",
    )


if __name__ == "__main__":
    main()
