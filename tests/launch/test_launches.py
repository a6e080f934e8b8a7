"""Launches that cannot work: each is refused at once, in one line with cause, evidence and remedy; and what works."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import app
from config import Config, ConfigError
from launch import doctor, preflight
from models.sources import catalog
from tests.support import ROOT, limited, points
from tests.support.checkpoints import write_checkpoint
from tests.support.servers import Server, free_port, run_app

MOCK = ["--model", "mock:llm-mock"]
REMEDY = re.compile(r"error: .+\. .*(Use|use|Run|Set|set|Install|choose|Free|Remove)")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("launch") / "tiny")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [n for n in os.environ if n.startswith("EB_")] + ["BATCHING"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return monkeypatch


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line that a launch in this process is refused with."""
    given = [*argv, *([] if "--port" in argv else ["--port", str(free_port())])]
    with pytest.raises(SystemExit) as caught:
        app.main([*given, *([] if "--host" in argv else ["--host", "127.0.0.1"])])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    # A search of the hub that takes over a second, as on a busy machine, is noted.
    error = "".join(line for line in said.err.splitlines(True) if not line.startswith("looking for"))
    assert error.count("\n") == 1, said.err
    assert REMEDY.match(error), said.err
    return error


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        ({"EB_CACHE_DIR": "/dev/full"}, [], "cache folder /dev/full: "),
        ({"EB_CACHE_DIR": "/proc/nowhere"}, [], "cache folder /proc/nowhere: "),
        ({}, ["--batch-folder", "/proc/nowhere"], "folder of batches /proc/nowhere: "),
        ({"BATCHING": "dinamic"}, [], "unknown policy 'dinamic'. Did you mean 'dynamic'?"),
        ({}, ["dynamic", "--policy-option", "w=1"], "no option 'w'"),
        ({}, ["--tokenizer-file", "/nowhere.tiktoken"], "/nowhere.tiktoken"),
        ({}, ["--max-connections", "5"], "--max-connections is 5"),
        ({}, ["--model", "/nowhere"], "unknown model '/nowhere'"),
        ({}, ["--model", "gpt2-xl"], "cannot load gpt2-xl"),
        ({}, ["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        ({}, ["--host", "no.such.host.invalid"], "cannot listen on no.such.host"),
        ({}, ["--shadow", "static"], "--shadow was removed in 0.2.0. Use POST /what-if"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    environ: dict[str, str], flags: list[str], words: str,
) -> None:  # fmt: skip
    variables.setenv("HF_HOME", str(tmp_path))
    for name, value in environ.items():
        variables.setenv(name, value)
    assert words in refused(capsys, *(flags if "--model" in flags else [*flags, "--model", "bard"]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "broken or truncated"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"not a checkpoint"), "model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[" * 90_000), "nested too deeply"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_weights_that_are_missing_or_broken_are_refused(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path,
    spoil: Callable[[Path], Any], words: str,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    spoil(folder)
    assert words in refused(capsys, "--model", str(folder))


def test_a_port_in_use_is_refused(variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(capsys, "--port", str(port))
    assert line.startswith(f"error: port {port} on 127.0.0.1")
    assert line.endswith(f"--port {port % 65535 + 1}\n")


def test_a_full_disk_is_refused(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variables.setenv("EB_CACHE_DIR", str(tmp_path))
    with limited(resource.RLIMIT_FSIZE, 100):  # so that writing fails as it does on a full disk
        said = refused(capsys, "--model", "bard")
    assert "temporary folder" in said


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    points(
        1,
        *(
            (MOCK, {"GUNICORN_CMD_ARGS": args}, "GUNICORN_CMD_ARGS")
            for args in ("--preload", "--workers 2", "-k sync", "--threads 4")
        ),
        (["--kv-memory", "1K"], {}, "--kv-memory"),
        (["--dtype", "float16", "--device", "cpu"], {}, "float16 is for GPUs"),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "--device cuda"),
    ),
)
def test_what_only_the_server_process_can_check_is_refused_in_one_line(
    tiny: Path, arguments: list[str], environ: dict[str, str], words: str
) -> None:
    flags = ["--model", str(tiny), "--host", "127.0.0.1", "--port", str(free_port()), *arguments]
    result = run_app("dynamic", *flags, **environ)
    assert result.returncode in (2, 3)
    assert result.stderr.count("\n") == 1, result.stderr
    assert REMEDY.match(result.stderr), result.stderr
    assert words in result.stderr


@pytest.mark.full
@pytest.mark.process
def test_no_check_is_an_assertion(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "dynamic", "--model", "mock:llm-mock", PYTHONOPTIMIZE="1") as server:
        assert server.post(prompt="the house", num_tokens=3).json["num_tokens"] == 3
        for fields in ({"num_tokens": 0}, {"temperature": -1}, {"top_p": 2}, {"prompt": ""}):
            answer = server.post(**({"prompt": "x", "num_tokens": 1} | fields))
            assert answer.status == 400
            assert answer.json["error"]["param"] == next(iter(fields))


def test_the_doctor_has_a_line_for_each_check_and_a_remedy_for_each_failure(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path
) -> None:
    variables.setenv("HF_HOME", str(tmp_path))
    assert doctor.examine(Config(model=str(tiny), host="127.0.0.1", port=free_port()))
    healthy = capsys.readouterr().out.splitlines()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert not doctor.examine(Config(model="/nowhere", host="127.0.0.1", port=port))
    sick = capsys.readouterr().out.splitlines()
    names = ["python", "torch", "gpu", "device", "compiler", "disk", "open files", "port", "weights", "tokenizer"]
    for lines in (healthy, sick):
        assert [line[4:16].strip() for line in lines] == names
    assert {line[:4] for line in healthy} == {"ok  "}
    assert [line[4:16].strip() for line in sick if line.startswith("NO ")] == names[7:]
    assert all(re.search(r"\. .*(Stop|Use)", line) for line in sick if line.startswith("NO "))


def test_without_torch_only_mocks_are_served(variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    variables.setitem(sys.modules, "torch", None)
    variables.setattr(importlib.util, "find_spec", lambda name: None)
    mocked = Config(model="mock:llm-mock", host="127.0.0.1", port=free_port())
    preflight.check(mocked)
    assert doctor.examine(mocked)
    assert capsys.readouterr().out.count("mock:llm-mock needs no") == 4
    with pytest.raises(ConfigError, match=r"PyTorch .* Start with \./server\.sh"):
        preflight.check(dataclasses.replace(mocked, model="bard"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_download_ends_in_one_line(
    variables: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    left: list[str] = []

    def download(*_: Any) -> None:
        try:
            signal.raise_signal(number)
        finally:
            left.append("cleaned up")

    variables.setattr(catalog, "resolve", download)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            app.main(["dynamic", "--model", "smollm2", "--host", "127.0.0.1", "--port", str(free_port())])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (end.value.code, left) == (130, ["cleaned up"])
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_while_the_server_is_imported_ends_in_one_line() -> None:
    script = """
import runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "click":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_path("app.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)


def test_only_a_repository_is_looked_for_on_the_hub(tmp_path: Path) -> None:
    names = ["gpt2", "owner/name", "owner/name:a.gguf", "smollm2", "bard", str(tmp_path), "missing.gguf"]
    assert [name for name in names if catalog.is_on_hub(name)] == names[:3]
