"""A hook that does not return, on a real server: its requests end when the server is told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, in_background, wait_until
from tests.support.servers import Server, clean_environment

LOOP = '''"""Hangs when its first request waits."""
import threading
from pathlib import Path

from scheduling import policy


class Policy(policy.Policy):
    def order(self, waiting, now):
        if waiting:
            Path(__file__).with_suffix(".hangs").touch()
            HANG
        return waiting
'''
HANGS = {"computes": "while True: pass", "waits": "threading.Event().wait()"}
DRAINS = 200  # seconds for which the server would wait for its requests, longer than the test does


@pytest.mark.process
@pytest.mark.parametrize(
    ("hang", "number"),
    [
        ("computes", signal.SIGTERM),
        pytest.param("waits", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("computes", signal.SIGINT, marks=pytest.mark.full),
    ],
)
def test_a_signal_ends_a_server_whose_hook_does_not_return(hang: str, number: signal.Signals, tmp_path: Path) -> None:
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP.replace("HANG", HANGS[hang]))
    argv = [str(loop), "--model", "mock:llm-mock@50", "--request-timeout", str(DRAINS)]
    with Server(tmp_path / "log", *argv) as server:
        with in_background(lambda: server.post(prompt="a", num_tokens=3)) as answers:
            wait_until(loop.with_suffix(".hangs").exists)
            server.process.send_signal(number)
        assert [answer.status for answer in answers] == [503]
        assert server.process.wait(60) == 0
        assert number == signal.SIGINT or "order() of loop.py, line" in server.output()


SHUTDOWN = """
import json, queue, signal, time
from types import SimpleNamespace
from launch import gunicorn_conf
sent = {}
for age in (1, 30):
    tmp = SimpleNamespace(last_update=lambda: time.monotonic() - age)
    server = SimpleNamespace(
        WORKERS={1: SimpleNamespace(tmp=tmp)}, worker_age=2, SIG_QUEUE=queue.SimpleQueue(),
        cfg=SimpleNamespace(set=lambda *_: None), kill_workers=sent.setdefault(age, []).append, signal=lambda *_: None,
    )
    gunicorn_conf.Shutdown(server)(signal.SIGTERM, None)
print(json.dumps(sent))
"""


def test_a_worker_that_a_call_in_c_keeps_from_its_heartbeat_is_not_waited_for() -> None:
    code = [sys.executable, "-c", SHUTDOWN]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, env=clean_environment(), check=True)
    assert json.loads(done.stdout) == {"1": [], "30": [signal.SIGQUIT]}
