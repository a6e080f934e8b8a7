"""Batches of a real server: kill -9 half way, a reload, and a polite end lose no line and answer none twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import wait_until
from tests.support.servers import Server, kill, processes_of

pytestmark = [pytest.mark.process, pytest.mark.full]
PATH = "/v1/completions"
LINES = 400


def start(folder: Path, name: str) -> Server:
    server = Server(folder / name, "dynamic", "--model", "mock:llm-mock@50", "--batch-folder", str(folder / "work"))
    return server.start().wait()


def begin(server: Server) -> str:
    """Upload a file and start its batch; return its id."""
    rows = (
        {"custom_id": f"r{i}", "method": "POST", "url": PATH, "body": {"prompt": f"hi {i}", "max_tokens": 20}}
        for i in range(LINES)
    )
    data = "\n".join(map(json.dumps, rows))
    head = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
    form = f"{head}{data}\r\n--b--\r\n".encode()
    file = server.send("POST", "/v1/files", form, **{"Content-Type": "multipart/form-data; boundary=b"}).json["id"]
    fields = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
    answer = server.send("POST", "/v1/batches", json.dumps(fields).encode(), **{"Content-Type": "application/json"})
    return str(answer.json["id"])


def state(server: Server, id: str) -> Any:
    return server.get(f"/v1/batches/{id}").json


def half_done(server: Server, id: str) -> bool:
    return bool(state(server, id)["request_counts"]["completed"] > LINES / 5)


def check_result(server: Server, id: str) -> None:
    """Wait for the end of a batch, and check that each line has one answer."""
    wait_until(lambda: state(server, id)["status"] == "completed", 60)
    done = state(server, id)
    assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    content = server.get(f"/v1/files/{done['output_file_id']}/content").body.decode().splitlines()
    assert sorted(json.loads(row)["custom_id"] for row in content) == sorted(f"r{i}" for i in range(LINES))


def test_a_batch_goes_on_after_kill_9_and_after_a_polite_end(tmp_path: Path) -> None:
    server = start(tmp_path, "first.log")
    id = begin(server)
    wait_until(lambda: half_done(server, id), 60)
    kill(server.process)
    kept = sum(path.read_text().count("response") for path in (tmp_path / "work/files").iterdir())
    assert kept > 0
    server = start(tmp_path, "second.log")
    began = time.monotonic()
    assert server.stop(30) == 0  # with the batch on its way
    assert time.monotonic() - began < 20
    server = start(tmp_path, "third.log")
    check_result(server, id)
    server.stop()


def test_a_killed_worker_and_a_reload_lose_nothing(tmp_path: Path) -> None:
    server = start(tmp_path, "server.log")
    id = begin(server)
    wait_until(lambda: half_done(server, id), 60)
    (worker,) = [pid for pid in processes_of(server.process.pid) if pid != server.process.pid][:1]
    os.kill(worker, signal.SIGKILL)
    server.wait()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.get("/health").status == 200, 60)
    check_result(server, id)
    assert server.stop() == 0
