"""`probe`: what it announces, sends, finds and keeps. The servers are scripted, but for one real process at the end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.report.measure import Outcome
from client.send.load import LoadRun
from simulate.__main__ import main
from simulate.fitting.fitted import held
from simulate.fitting.probe import Phase, plan, row
from simulate.logs.checks import checked
from simulate.logs.formats import SAME, request
from simulate.logs.log import Request
from tests.support.mock_server import MockServer
from tests.support.servers import Server

SMALL = ["--tokens", "6000"]


class Slotted(MockServer):
    """Serves three requests at once, and reports nothing about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = asyncio.Semaphore(3)
        self.stats = self.models = (404, {})

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        async with self.slots:
            await super()._generate(path, body, writer)


@pytest.fixture
def server() -> Iterator[Slotted]:
    each = Slotted()
    each.start()
    yield each
    each.stop()


@pytest.fixture(autouse=True)
def fitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace what is around the probe: what a server reports, and what is fitted. Return the logs that were to be fitted."""
    logs: list[Any] = []
    for name, function in {
        "fit": lambda log, kind, given, console: logs.append(log), "save": lambda path, fit: None,
        "report": lambda console, fit: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"simulate.commands.probe.{name}", function)
    monkeypatch.setattr("client.send.ask.facts", lambda url, key: {"page_size": 16})
    monkeypatch.chdir(tmp_path)
    return logs


def planned(tokens: int = 60_000, context: int = 2048, **server: Any) -> list[Phase]:
    return plan(tokens, context, server, np.random.default_rng(1))


def probe(server: MockServer, *argv: str) -> int:
    return main(["probe", server.url, "--engine", "vllm", *argv])


def kept() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what the log says of the server, and its requests by their ids."""
    head, *rows = map(json.loads, Path("probe.jsonl").read_text().splitlines())
    return head["server"], {row["id"]: row for row in rows}


def begun() -> set[str]:
    """Return the phases from which the log has requests."""
    return {name.partition("/")[0] for name in kept()[1]}


def slots_found(wanted: int, fitted: list[Any], run: Callable[[], int]) -> int:
    """Return the slots that a probe shows, of up to three: a client that pauses may see one begin before another ends."""
    for _ in range(3):
        assert run() == 0
        found, _ = held(log := fitted[-1], log.first, log.last)
        if found == wanted:
            break
    return found


@pytest.mark.parametrize("tokens", [1000, 3000, 20_000, 60_000, 300_000])
@pytest.mark.parametrize("slots", [None, 1, 3, 64, 256])
def test_a_plan_stays_within_its_tokens_and_begins_with_what_matters_most(tokens: int, slots: int | None) -> None:
    phases = planned(tokens, slots=slots, kv_tokens=41_000)
    assert sum(phase.tokens for phase in phases) <= tokens
    assert [phase.name for phase in phases[:2]] == ["first", "alone"]
    assert all(prompt + answer <= 2048 for phase in phases for _, prompt, answer in phase.asks)


def test_known_slots_are_filled_and_exceeded_by_eight() -> None:
    names = {phase.name for phase in planned(slots=24)}
    assert {"burst 16", "burst 24", "burst 32"} < names
    assert "burst 64" not in names
    assert "burst 264" in {phase.name for phase in planned(slots=256)}


def test_the_kv_memory_is_filled_if_it_is_known_and_affordable() -> None:
    (memory,) = (phase for phase in planned(kv_tokens=10_000) if phase.name == "memory")
    assert memory.tokens > 10_000
    assert "memory" not in {phase.name for phase in [*planned(kv_tokens=100_000), *planned()]}


@pytest.mark.parametrize("context", [64, 300, 1024, 8192])
def test_a_short_context_shortens_the_requests(context: int) -> None:
    longest = max(prompt + answer for phase in planned(context=context)[1:] for _, prompt, answer in phase.asks)
    assert longest <= context


def test_a_probe_logs_what_shows_three_slots(server: Slotted, fitted: list[Any]) -> None:
    server.ttft, server.itl = 0.01, 0.002  # a client that pauses for less sees one end before another begins
    assert slots_found(3, fitted, lambda: probe(server)) == 3
    log = fitted[-1]
    _, requests = kept()
    assert len(log.trace.seen) == len(requests)
    # A machine that pauses at the first requests looks like a server that is busy with others.
    assert [note for note in log.notes if "busy server" not in note.text] == []
    assert {"burst 2", "burst 4", "traffic"} < begun()
    alone = requests["alone/1"]
    assert alone["output"] == 128 == len(alone["chunks"]) == sum(alone["counts"])
    assert alone["sent"] < alone["first"] == alone["chunks"][0] < alone["last"] == alone["chunks"][-1]


def test_what_is_sent_was_announced_and_no_two_prompts_begin_alike(
    server: Slotted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(server, "--tokens", "10000", "--slots", "3") == 0
    first, told = server.asked[0], capsys.readouterr().err
    assert "tokens per word" in told
    assert "GET requests only" in told
    assert first["max_tokens"] == 8
    assert first["ignore_eos"]
    assert sum(body["max_tokens"] for body in server.asked) < 10_000
    words = [body["prompt"].split() for body in server.asked]
    assert [*map(len, words[:2])] == [64, round(32 * 64 / 7)]  # the server counts 7 tokens in a prompt of 64 words
    assert len({tuple(some[:6]) for some in words}) == len(words)


def test_a_dry_run_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "http://127.0.0.1:1", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tokens"] <= 60_000
    assert "burst 16" in captured.err
    assert not list(Path().iterdir())


def test_when_the_time_is_up_the_rest_is_left_out(server: Slotted, capsys: pytest.CaptureFixture[str]) -> None:
    server.itl = 0.01
    assert probe(server, "--minutes", "0.15") == 0
    assert "alone" in begun()
    assert sum(name.startswith("traffic") for name in kept()[1]) < 96
    assert "traffic" in capsys.readouterr().err.partition("left out")[2]


def test_a_request_that_was_cut_off_is_load_for_the_fit() -> None:
    cut = Outcome(0, 85, 0.0, 0.0, 4.0, 0, "cut off")
    found = row(Phase("traffic", "queues", [(0.0, 53, 85)]), cut, 0.0)
    assert (found["prompt"], found["output"], found["last"]) == (53, 85, None)
    log = checked([Request(i, 53, 2, i + 0.5, i + 1) for i in range(3)] + [request(found, SAME)], designed=True)
    assert log.output.tolist() == [2, 85, 2, 2]  # at the same time as the first
    assert math.isnan(log.last[1])


def test_chunks_of_several_tokens_keep_their_numbers(server: Slotted) -> None:
    server.together = 4
    assert probe(server, *SMALL) == 0
    assert kept()[1]["alone/0"]["counts"] == [4] * 32


def test_tgi_and_the_own_api_are_probed_too(server: Slotted) -> None:
    for api, path in (("tgi", "/generate_stream"), ("inference", "/inference")):
        assert probe(server, *SMALL, "--api", api) == 0
        assert server.paths[-1] == path


def test_an_answer_that_ends_early_is_logged_with_its_own_length(server: Slotted) -> None:
    generate = server._generate

    async def shorter(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await generate(path, {**body, "max_tokens": min(5, body["max_tokens"])}, writer)

    server._generate = shorter  # type: ignore[method-assign]
    assert probe(server, *SMALL) == 0
    alone = kept()[1]["alone/0"]
    assert (alone["output"], alone["limit"]) == (5, 128)


REFUSALS = {
    "401": (401, {"error": {"message": "no key"}}), "404": (404, {}), "429": (429, {"error": {"message": "too many"}}),
    "no stream": (200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1, "prompt_tokens": 1}}),
    "closed": (0, None), "no answer": (200, b"<html>"),
}  # fmt: skip
FAILED = {"error": {"message": "out of memory", "type": "internal"}}
BROKEN: dict[str, tuple[dict[str, Any], str, str]] = {
    **{name: ({"answer": lambda body, answer=answer: answer}, "", "failed: ") for name, answer in REFUSALS.items()},
    "cut": ({"cut_after": 3}, "", "stream cut"),
    "fails": ({"cut_after": 3, "last_words": FAILED}, "", "out of memory"),
    "hangs": ({"itl": 60}, "--minutes=0.02", "nothing was measured"),
    "times out": ({"itl": 60}, "--timeout=0.3", "raise --timeout"),
}


@pytest.mark.parametrize(("fault", "flag", "words"), BROKEN.values(), ids=BROKEN)
def test_a_server_that_refuses_or_fails_ends_the_probe_with_a_sentence(
    fault: dict[str, Any], flag: str, words: str, server: Slotted, fitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    vars(server).update(fault)
    assert probe(server, *filter(None, [flag])) == 1
    assert words in capsys.readouterr().err
    assert len(server.asked) == 1
    assert not fitted


def test_a_stream_without_usage_is_refused(
    server: Slotted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.mock_server.usage", lambda count, body=None: None)
    assert probe(server) == 1
    assert "usage" in capsys.readouterr().err


def test_a_server_that_dies_in_the_middle_leaves_the_log_so_far(server: Slotted, fitted: list[Any]) -> None:
    server.answer = lambda body: (0, None) if len(server.asked) > 12 else None
    assert probe(server) == 1
    errors = [request["error"] for request in kept()[1].values()]
    assert "connection broken" in errors[-1]
    assert errors.count("") == 11
    assert not fitted


def test_ctrl_c_keeps_the_log(server: Slotted, monkeypatch: pytest.MonkeyPatch, fitted: list[Any]) -> None:
    wait = LoadRun.wait

    def interrupted(self: LoadRun, seconds: float | None = None) -> bool:
        if len(server.asked) > 12:
            raise KeyboardInterrupt
        return wait(self, seconds)

    monkeypatch.setattr(LoadRun, "wait", interrupted)
    assert probe(server) == 130
    assert "alone" in begun()
    assert not fitted


def test_no_server_no_key_and_no_known_engine_are_said_before_anything_is_sent(
    server: Slotted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "http://127.0.0.1:1"]) == 1
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["probe", server.url]) == 1
    assert "--engine" in capsys.readouterr().err
    server.models = (401, {})
    assert probe(server) == 2
    assert f"{server.url} requires an API key" in capsys.readouterr().err
    assert not server.asked


def test_the_slots_of_a_real_server_are_found(tmp_path: Path, fitted: list[Any]) -> None:
    with Server(tmp_path / "log", "dynamic", "--model", "mock:vtc-a10g@5", "--max-batch-size", "5") as real:
        argv = ["probe", f"http://127.0.0.1:{real.port}", "--engine", "ours", "--tokens", "3000"]
        assert slots_found(5, fitted, lambda: main(argv)) == 5
    assert kept()[1]["alone/0"]["prompt"] == 32
