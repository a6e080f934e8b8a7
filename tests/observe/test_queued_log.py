"""The queue between those who log and what may block."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient

from api.service import Service
from app import create_app
from config import Config
from observe import queued_log
from observe.queued_log import QueuedHandler, QueuedLog
from tests.support import SOON
from tests.support.fakes import FakeModel, fake_engine


class Stuck(io.StringIO):
    """A pipe whose reader does not read until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(SOON)
        return super().write(text)


class Full(io.StringIO):
    """A full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture
def client(model: FakeModel) -> Iterator[FlaskClient]:
    app = create_app(Config(policy="dynamic"))
    service: Service = app.extensions["service"]
    service.serves = True
    service.engine = engine = fake_engine(model)
    yield app.test_client()
    engine.manager.stop()


def log_to(client: FlaskClient, stream: io.StringIO) -> QueuedLog:
    service: Service = client.application.extensions["service"]
    service.access_log = log = QueuedLog(stream)
    log.start()
    return log


def ask(client: FlaskClient) -> str:
    completion: str = client.post("/inference", json={"prompt": "hi", "num_tokens": 3}).get_json()["completion"]
    return completion


def test_a_log_whose_reader_is_stuck_delays_no_request(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_log, "CAPACITY", 4)
    stuck = Stuck()
    log = log_to(client, stuck)
    assert {ask(client) for _ in range(20)} == {"hiabc"}
    assert log.dropped >= 10
    assert f"eb_events_dropped_total {float(log.dropped)}" in client.get("/metrics").text
    stuck.go.set()


def test_lines_that_a_full_disk_does_not_take_are_counted(client: FlaskClient) -> None:
    log = log_to(client, Full())
    assert {ask(client) for _ in range(3)} == {"hiabc"}
    log.flush(SOON)
    assert log.dropped == 3


def test_lines_stay_in_order_from_before_the_thread_starts_and_dictionaries_become_json() -> None:
    log = QueuedLog(stream := io.StringIO())
    log.write("early")
    log.start()
    for i in range(100):
        log.write({"n": i} if i % 2 else f"line {i}")
    log.flush(SOON)
    written = stream.getvalue().splitlines()
    assert written[:3] == ["early", "line 0", '{"n":1}']
    assert len(written) == 101


def test_a_flush_does_not_wait_for_a_stuck_reader() -> None:
    log = QueuedLog(stuck := Stuck())
    log.start()
    log.write("line")
    log.flush(0.05)
    assert stuck.getvalue() == ""
    stuck.go.set()


def test_log_records_go_through_the_queue_with_their_traceback() -> None:
    log = QueuedLog(stream := io.StringIO())
    log.start()
    logger = logging.Logger("test")
    logger.addHandler(QueuedHandler(log))
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("step %d", 3)
    log.flush(SOON)
    assert stream.getvalue().startswith("step 3\nTraceback")
    assert "KeyError: 'lost'" in stream.getvalue()
