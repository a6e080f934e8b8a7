"""The banner of a server that is ready, and its warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
from typing import Any

import pytest

from app import create_app
from config import Config
from launch import banner
from tests.support.fakes import FakeTokenizer, fake_engine


def shown(config: Config, capsys: pytest.CaptureFixture[str], tokenizer: Any = None, **facts: Any) -> str:
    engine = fake_engine(policy=config.policy, tokenizer=tokenizer)
    try:
        banner.show(config, dataclasses.replace(engine, facts=facts), 1.25)
    finally:
        engine.manager.stop()
    return capsys.readouterr().err


def test_the_banner_names_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(
        Config(policy="dynamic", host="127.0.0.1", port=8123), capsys,
        parameters=3_000_000, kv_bytes=64 << 20, compute_threads=2, attention="c",
    )  # fmt: skip
    for words in ("dynamic, 8 slots", "queue of 8", "fake, 3.0 M parameters",
                  "context 1,024", "cpu, float32, 2 threads", "64 MiB", "127.0.0.1:8123", "ready in 1.2 s",
                  "curl -X POST http://127.0.0.1:8123/inference", "/stats"):  # fmt: skip
        assert words in text, words
    assert re.search(r"API key +none", text)
    assert not re.search("warning|HTTP threads|attention", text)
    assert "nobatch, 1 of 8 slots" in shown(Config(policy="nobatch"), capsys)


def test_on_a_terminal_no_word_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    whole = shown(Config(policy="dynamic"), capsys, parameters=3_000_000, kv_bytes=64 << 20)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    wrapped = shown(Config(policy="dynamic"), capsys, parameters=3_000_000, kv_bytes=64 << 20)
    assert wrapped.split() == whole.split()
    assert (
        max(len(line) for line in wrapped.splitlines() if "curl" not in line) <= 60 < max(map(len, whole.splitlines()))
    )


def test_a_model_with_a_chat_template_is_tried_with_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = lambda messages, answers: ("hi", [104, 105])
    lines = shown(Config(host="127.0.0.1", port=8123), capsys, tokenizer).splitlines()
    command = "\n".join(lines[lines.index("try") + 1 : -1])
    assert max(map(len, command.splitlines())) <= 80
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    engine = fake_engine(tokenizer=tokenizer)
    path = words[1].removeprefix("http://127.0.0.1:8123")
    reply = create_app(Config(access_log=False), engine).test_client().post(path, json={**body, "max_tokens": 2})
    engine.manager.stop()
    assert reply.get_json()["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:"), ("10.1.2.3", "http://10.1.2.3:")])  # fmt: skip
def test_a_public_address_without_a_key_is_warned_of(host: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Config(host=host), capsys)
    address = "[::]:8500" if host == "::" else f"{host}:8500"
    assert f"{address} may use this server" in text
    assert f"{address}, ready" in text
    assert "--api-key" in text
    assert "--host 127.0.0.1" in text
    assert url in text
    text = shown(Config(host=host, api_key="hunter2"), capsys)
    assert "warning" not in text
    assert "hunter2" not in text
    assert re.search(r"API key +required", text)


def test_what_cannot_be_said_at_the_start_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", full)
    banner.warn("nobody can read this")
    with contextlib.suppress(OSError):  # closing writes what is left
        full.close()
