"""`python -m benchmarks.peers`: how peers are started, measured, compared and ended, with stand-ins for real ones."""

from __future__ import annotations

import argparse
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import measure
from benchmarks.peers.ours import NAME, Ours, OursOffline
from benchmarks.peers.peer import Job, NotMeasured, OfflinePeer, Peer, ServerPeer
from client.send.servers import free_port
from tests.support.mock_server import mock_server

ARGS = argparse.Namespace(slots=4, single=2, repeats=1, seed=1, start_limit=60.0)
ECHO = "from benchmarks.peers.peer import answer\nanswer(lambda order: lambda requests: sum(n for _, n in requests))\n"


class Fake(ServerPeer):
    """A file server, which knows no way to complete a text."""

    name = "fake"
    install = "nothing"
    formats = ("int8",)
    ready = "/"

    def command(self, port: int) -> list[str]:
        return [str(self.program), "-m", "http.server", "--bind", "127.0.0.1", str(port)]


class Crashing(Fake):
    def command(self, port: int) -> list[str]:
        return [str(self.program), "-c", "raise SystemExit('no such model')"]


class FakeOffline(OfflinePeer):
    name = "fake"
    install = "nothing"
    formats = ("int8",)

    def command(self, order: Path, result: Path) -> list[str]:
        return [str(self.program), "-c", self.job.model, str(order), str(result)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("model", tmp_path, None, tmp_path, slots=4, context=512, threads=1)


PYTHON = Path(sys.executable)


@pytest.mark.process
def test_both_loads_reach_a_server_and_give_rates() -> None:
    with mock_server() as server:
        rates = measure.loads(server.port, Fake.client_flags, ARGS)
    assert len(server.asked) == 3 + 4 + 3 + 2  # each load after its warm-up
    assert all(rate > 0 for rate in [*rates["burst"], *rates["stream"]])


@pytest.mark.process
def test_a_server_without_completions_is_not_measured(job: Job) -> None:
    with pytest.raises(NotMeasured):
        measure.measure(Fake(PYTHON, "int8", job), ARGS)


@pytest.mark.process
def test_a_started_server_is_ended(job: Job) -> None:
    port = free_port()
    log = job.work / "log"
    with measure.running(Fake(PYTHON, "int8", job).command(port), {}, log) as process:
        measure.wait_until_ready(f"http://127.0.0.1:{port}/", process, log, 60)
    assert process.returncode is not None
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)


@pytest.mark.process
def test_the_reason_of_a_server_that_does_not_start_is_its_last_line(job: Job) -> None:
    with pytest.raises(NotMeasured, match="no such model"):
        measure.measure(Crashing(PYTHON, "int8", job), ARGS)


def test_the_reason_of_a_known_failure_comes_with_its_remedy() -> None:
    reason = measure.last_line(b"loading\nRuntimeError: operator torchvision::nms does not exist\nbye\n")
    assert reason.startswith("RuntimeError")
    assert "pip uninstall torchvision" in reason


@pytest.mark.process
def test_a_peer_without_a_server_answers_in_a_process_of_its_own(job: Job) -> None:
    works = FakeOffline(PYTHON, "int8", replace(job, model=ECHO))
    rates = measure.measure(works, ARGS)
    assert [len(rates[load]) for load in ("burst", "stream")] == [1, 1]
    with pytest.raises(NotMeasured, match="no such module"):
        measure.measure(FakeOffline(PYTHON, "int8", replace(job, model="exit('no such module')")), ARGS)


def test_a_program_that_is_not_there_is_named_with_how_to_install_it(job: Job) -> None:
    with pytest.raises(NotMeasured, match="nothing"):
        measure.measure(Fake(Path("/nowhere/fake"), "int8", job), ARGS)


def test_ratios_are_against_ourselves_before_and_after(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {NAME: [100.0, 140.0, 180.0], "fake": [60.0], "vllm": [10.0]}
    seen: list[str] = []

    def rates(peer: Peer, args: argparse.Namespace) -> measure.Rates:
        seen.append(peer.name)
        if not speeds[peer.name]:
            raise NotMeasured("stopped")
        rate = speeds[peer.name].pop(0)
        return {"burst": [rate], "stream": [rate / 10]}

    monkeypatch.setattr(peers, "measure", rates)
    others = [Fake(PYTHON, "int8", job), peers.read_peer("vllm=python", job)]
    ours: dict[str, Peer] = {"HTTP": Ours(PYTHON, "int8", job), "offline": OursOffline(PYTHON, "int8", job)}
    result = peers.run(others, [ours], ARGS)
    assert seen == [NAME, "fake", NAME, "vllm", NAME]
    assert [ratio["burst"] for ratio in result["ratios"]] == [pytest.approx(2.0), pytest.approx(16.0)]
    assert {"llama.cpp", "openvino", "transformers"} == result["not_measured"].keys()
    rates, ratio = peers.tables({**result, "processor": "any", "slots": 4})
    assert (rates.row_count, ratio.row_count) == (5, 2)


def test_a_peer_that_fails_costs_only_its_own_figures(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(peer: Peer, args: argparse.Namespace) -> measure.Rates:
        if peer.name == "vllm":
            raise NotMeasured("it ended")
        return {"burst": [50.0], "stream": [5.0]}

    monkeypatch.setattr(peers, "measure", rates)
    ours: dict[str, Peer] = {"HTTP": Ours(PYTHON, "int8", job)}
    result = peers.run([peers.read_peer("vllm=python", job), Fake(PYTHON, "int8", job)], [ours], ARGS)
    assert [(ratio["peer"], ratio["burst"]) for ratio in result["ratios"]] == [("fake int8", 1.0)]
    assert result["not_measured"]["vllm bfloat16"] == "it ended"


def test_an_interrupted_run_keeps_what_was_measured(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(peer: Peer, args: argparse.Namespace) -> measure.Rates:
        if peer.name == "vllm":
            raise KeyboardInterrupt
        return {"burst": [50.0], "stream": [5.0]}

    monkeypatch.setattr(peers, "measure", rates)
    ours: dict[str, Peer] = {"HTTP": Ours(PYTHON, "int8", job)}
    result = peers.run([Fake(PYTHON, "int8", job), peers.read_peer("vllm=python", job)], [ours], ARGS)
    assert [r["name"] for r in result["rounds"]] == [NAME, "fake", NAME]
    assert len(result["ratios"]) == 1
    assert "vllm bfloat16" in result["not_measured"]


@pytest.mark.parametrize("text", ["vllm", "vllm=", "ollama=bin/ollama", "vllm=python@int3"])
def test_what_is_no_peer_is_refused(text: str, job: Job) -> None:
    with pytest.raises(ValueError, match="Use"):
        peers.read_peer(text, job)


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_without_a_model_for_it_is_not_measured(name: str, tmp_path: Path) -> None:
    job = Job("bard", None, None, tmp_path, slots=4, context=512, threads=1)
    with pytest.raises(NotMeasured, match="Set --"):
        measure.measure(peers.read_peer(f"{name}={PYTHON}", job), ARGS)
