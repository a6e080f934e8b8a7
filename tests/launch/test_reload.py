"""SIGHUP: a new worker takes over without a gap, and one that cannot load takes nothing over."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Server, in_background, wait_until, write_checkpoint

from launch.succession import Succession

LONG = {"prompt": "the house", "num_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    """Return a server with a model folder of its own, whose every load takes a second more and every step 5 ms."""
    folder = shutil.copytree(model, tmp_path / "own")
    slow = {"slow_load": {"seconds": 1}, "slow_step": {"ms": 5}}
    with Server(
        tmp_path / "log", "dynamic", "--model", str(folder), "--compute-threads", "1",
        EB_FAULTS=json.dumps(slow),
    ) as server:  # fmt: skip
        yield server


def workers(server: Server) -> set[int]:
    master = server.process.pid
    return set(map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split()))


def put(path: Path, content: bytes) -> None:
    """Write another file in the place of this one, which the worker that serves may have mapped."""
    path.unlink()
    path.write_bytes(content)


def reload(server: Server) -> set[int]:
    """Ask for a reload; return the workers from before once there is another."""
    old = workers(server)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: workers(server) - old, 60)
    return old


@pytest.mark.process
def test_a_reload_refuses_nobody_and_ends_nothing_early(server: Server) -> None:
    expected = server.post(**LONG).json
    with in_background(lambda: server.post(**LONG)) as early:
        wait_until(lambda: server.get("/stats").json["requests-running"] == 1)
        old = reload(server)
        newcomers = []
        while workers(server) & old:
            answer = server.post(prompt="the", num_tokens=3)
            newcomers.append(answer.status)
        assert set(newcomers) == {200}
        assert len(newcomers) > 5  # some of them while the new one was loading
    assert early[0].status == 200
    assert early[0].json["completion"] == expected["completion"]
    assert server.post(**LONG).json["completion"] == expected["completion"]
    assert server.output().count("Traceback") == 0


@pytest.mark.process
def test_a_reload_of_a_broken_model_leaves_the_worker_that_serves(
    server: Server, tmp_path: Path
) -> None:
    weights = tmp_path / "own" / "model.safetensors"
    whole = weights.read_bytes()
    put(weights, whole[:100])
    for _ in range(2):
        old = reload(server)
        wait_until(lambda: workers(server) == old, 60)  # noqa: B023
        wait_until(lambda: "the current worker continues" in server.output())
        assert server.post(**LONG).status == 200
    assert server.output().count("error: ") == 2, server.output()
    put(weights, whole)
    old = reload(server)
    wait_until(lambda: not workers(server) & old, 60)
    assert server.get("/health").status == 200
    assert server.stop(10) == 0


@pytest.mark.process
def test_sigterm_ends_a_server_whose_reload_failed(server: Server, tmp_path: Path) -> None:
    put(tmp_path / "own" / "model.safetensors", b"")
    old = reload(server)
    wait_until(lambda: workers(server) == old, 60)
    assert server.stop(10) == 0


@pytest.fixture
def slow_loader(tmp_path: Path) -> Iterator[Server]:
    """Return a server whose loads take longer than gunicorn waits for a worker to end."""
    slow = {"slow_load": {"seconds": 6}, "slow_step": {"ms": 5}}
    with Server(
        tmp_path / "log", "dynamic", "--model", "mock:llm-mock@50",
        EB_FAULTS=json.dumps(slow), GUNICORN_CMD_ARGS="--graceful-timeout 3",
    ) as server:  # fmt: skip
        yield server


@pytest.mark.process
def test_a_load_longer_than_the_masters_patience_refuses_nobody(slow_loader: Server) -> None:
    old = reload(slow_loader)
    answers = []
    while workers(slow_loader) & old:
        answers.append(slow_loader.post(prompt="the", num_tokens=3).status)
    assert set(answers) == {200}
    assert slow_loader.post(prompt="the", num_tokens=3).status == 200


@pytest.mark.process
def test_sigterm_during_a_reload_does_not_wait_for_it(slow_loader: Server) -> None:
    slow_loader.process.send_signal(signal.SIGTTIN)  # there is one worker all the same
    with in_background(lambda: slow_loader.post(**LONG)) as early:
        wait_until(lambda: slow_loader.get("/stats").json["requests-running"] == 1)
        assert len(workers(slow_loader)) == 1
        reload(slow_loader)
        slow_loader.process.send_signal(signal.SIGHUP)
        assert slow_loader.stop(5) == 0
    assert early[0].status == 200


def test_a_worker_knows_whether_its_heir_bows_out() -> None:
    line = Succession()
    first, second = line.announce(), line.announce()
    assert not line.bows_out(first)
    line.bow_out(second)
    assert line.bows_out(first)
    line.withdraw(second, first)
    assert line.bows_out(first)  # it may have gone before the first one looked
    line.announce()
    assert not line.bows_out(first)


def test_a_worker_knows_its_heir_and_when_it_is_relieved() -> None:
    line = Succession()
    first = line.announce()
    line.take_over(first)
    assert not line.has_heir(first)
    second = line.announce()
    assert line.has_heir(first)
    assert not line.is_relieved(first)
    line.take_over(second)
    assert line.is_relieved(first)
    assert not line.withdraw(first, second)  # the old one ends, as it should
    assert not line.has_heir(second)


def test_who_stays_for_an_heir_that_failed_has_none() -> None:
    line = Succession()
    first, second = line.announce(), line.announce()
    assert line.withdraw(second, first)
    assert not line.has_heir(first)
    third = line.announce()
    assert third > second
    assert line.has_heir(first)
