"""The cost of each stage of answering one short request, called by itself in one thread.

The rest of a real server's processor time goes to its sockets, its threads, and the steps of the engine.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import gunicorn.http
from flask import jsonify, request
from gunicorn.config import Config as GunicornConfig
from gunicorn.http import wsgi

import app as application
from api.dialects import native
from api.generation import start_generation
from api.schemas import body
from batching import BatchingManager
from benchmarks import closed_loop
from config import Config
from launch.engine import load_engine

BODY = json.dumps({"prompt": "ROMEO:", "num_tokens": 1}).encode()
ROUNDS, CALLS = 7, 300


def microseconds(call: Callable[[], object]) -> float:
    """Return the processor time of one call: the median of some rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time() - began) / CALLS)
    return 1e6 * statistics.median(times)


def environ() -> dict[str, object]:
    """Return the WSGI environment of the request."""
    return {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/inference", "QUERY_STRING": "", "SCRIPT_NAME": "",
        "SERVER_NAME": "127.0.0.1", "SERVER_PORT": "8500", "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "x", "REMOTE_ADDR": "127.0.0.1", "wsgi.url_scheme": "http", "wsgi.errors": io.StringIO(),
        "wsgi.input": io.BytesIO(BODY), "CONTENT_LENGTH": str(len(BODY)), "CONTENT_TYPE": "application/json",
    }  # fmt: skip


def parse() -> Callable[[], object]:
    """Return what reads the request from a socket and makes its WSGI environment."""
    config, (near, far) = GunicornConfig(), socket.socketpair()
    message = closed_loop.request("/inference", BODY)
    address = ("127.0.0.1", 1)

    def call() -> None:
        far.sendall(message)
        req = next(gunicorn.http.get_parser(config, near, address))
        wsgi.create(req, near, address, address, config)
        req.body.read()

    return call


def measure(model: str) -> dict[str, float]:
    """Return microseconds by stage."""
    config = Config(policy="dynamic", model=model, compute_threads=1)
    engine = load_engine(config)
    engine.manager.stop()
    silent = BatchingManager(engine.manager.model, max_queue=1 << 30)  # accepts requests and never computes
    app = application.create_app(config, replace(engine, manager=silent))
    service = app.extensions["service"]
    service.serves, service.access_log = True, SimpleNamespace(write=json.dumps)
    stages = {"parse": microseconds(parse())}

    def pass_through() -> None:
        with app.request_context(environ()):
            app.preprocess_request()
            app.finalize_request(b"")

    stages["route and log"] = microseconds(pass_through)
    with app.request_context(environ()):
        app.preprocess_request()
        fields = body.parse(BODY, "")
        params, _ = body.validate(native.InferenceRequest, fields)
        wanted = native.generation_request(service.engine, params)
        generation = start_generation(service, service.engine, wanted)
        for inference in generation.inferences:
            inference.add_token(1)
            inference.sequence.finish_reason = "length"
            inference.finished()

        def read() -> None:
            request.environ["wsgi.input"] = io.BytesIO(BODY)
            with contextlib.suppress(KeyError):
                del request.__dict__["stream"]
            body.take(request, "", any_type=True)

        stages["read JSON"] = microseconds(read)
        stages["validate"] = microseconds(lambda: body.validate(native.InferenceRequest, fields))
        stages["tokenize"] = microseconds(lambda: native.generation_request(service.engine, params))
        stages["enqueue"] = microseconds(lambda: start_generation(service, service.engine, wanted))
        stages["answer"] = microseconds(lambda: jsonify(native.answer(generation)).get_data())
    return stages
