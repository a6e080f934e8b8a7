"""SIGHUP: gunicorn's plain reload. Accepted requests finish, and new ones get 503 while the model loads."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support import in_background, wait_until
from tests.support.faults import arming
from tests.support.servers import Answer, Server

LONG = {"prompt": "the house", "num_tokens": 200, "temperature": 0}


def slow(seconds: float) -> dict[str, str]:
    """Return the faults that make every load take so much longer, and every step 5 ms."""
    return arming({"slow_load": {"seconds": seconds}, "slow_step": {"ms": 5}})


def reload(server: Server) -> set[int]:
    """Ask for a reload; return the workers from before once there is another."""
    old = set(server.workers)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: set(server.workers) - old)
    return old


MOCK = ("dynamic", "--model", "mock:llm-mock@50")


@pytest.mark.process
def test_a_reload_finishes_accepted_requests_and_answers_new_ones_503_until_the_model_is_loaded(tmp_path: Path) -> None:
    with Server(tmp_path / "log", *MOCK, **slow(1)) as server:
        expected = server.post(**LONG).json
        refused: list[Answer] = []
        for _ in range(3):  # who stands still while the model loads sees no refusal
            with in_background(lambda: server.post(**LONG)) as early:
                wait_until(lambda: early or server.get("/stats").json["requests-running"] == 1)
                old = reload(server)
                answers = []

                def has_ended() -> bool:
                    answers.append(server.post(prompt="the", num_tokens=3))  # noqa: B023
                    return not old & {*server.workers}  # noqa: B023

                wait_until(has_ended)
            assert {answer.status for answer in answers} <= {200, 503}
            assert early[0].status == 200
            assert early[0].json["completion"] == expected["completion"]
            wait_until(lambda: server.get("/ready").status == 200)
            if refused := [answer for answer in answers if answer.status == 503]:
                break
        assert refused
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert server.post(**LONG).json["completion"] == expected["completion"]
        assert server.output().count("Traceback") == 0


@pytest.mark.full
@pytest.mark.process
def test_a_reload_of_a_broken_model_ends_the_server_and_says_why(tmp_path: Path) -> None:
    model = tmp_path / "cost.json"
    model.write_text('{"cost": {"kind": "affine", "base": 0.002}}')
    with Server(tmp_path / "log", "dynamic", "--model", f"mock:{model}") as server:
        model.write_text("{")
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(60) == 3
        assert "error: " in server.output()


@pytest.mark.process
def test_sigterm_during_a_reload_does_not_wait_for_it(tmp_path: Path) -> None:
    # Loads take longer than a worker may take to end.
    variables = slow(6) | {"GUNICORN_CMD_ARGS": "--graceful-timeout 3"}
    short = LONG | {"num_tokens": 40}  # it ends well within the time that a drain may take
    with Server(tmp_path / "log", *MOCK, **variables) as server:
        with in_background(lambda: server.post(**short)) as early:
            wait_until(lambda: early or server.get("/stats").json["requests-running"] == 1)
            assert len(server.workers) == 1
            reload(server)
            server.process.send_signal(signal.SIGHUP)
            assert server.stop() == 0
        assert early[0].status == 200
        assert server.output().count("ready in") == 1  # nobody waited until the new worker had loaded
