"""A chat in the terminal: what is sent, what stays in the conversation, and which server answers."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import pytest
import requests

from client import chat, flags
from client.send import servers
from tests.support.mock_server import CHAT, MockServer

ANSWER = " x x x x x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(patch: pytest.MonkeyPatch, lines: str, *argv: str, stdin: type[io.StringIO] = io.StringIO) -> int:
    patch.setattr("sys.stdin", stdin(lines))
    return chat.main([*argv])


def contents(server: MockServer) -> list[list[str]]:
    return [[message["content"] for message in body["messages"]] for body in server.asked]


def test_each_line_is_a_message_of_the_conversation_until_a_new_one(
    server: MockServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "one\n\ntwo\n/new\nthree\n/quit\n/exit\nnever\n"
    assert said(monkeypatch, lines, server.url, "--api-key", "secret", "--temperature", "0.5") == 0
    printed = capsys.readouterr()
    assert contents(server) == [["one"], ["one", ANSWER, "two"], ["three"]]
    assert printed.out == f"{ANSWER}\n" * 3
    assert "unknown command '/quit'. Use /new or /exit" in printed.err
    assert (server.paths[0], server.keys[0]) == (CHAT, "Bearer secret")
    assert {name: server.asked[0][name] for name in ("model", "temperature", "stream")} == {
        "model": "bard", "temperature": 0.5, "stream": True
    }  # fmt: skip


def test_a_refused_message_leaves_the_conversation_and_the_reason_is_shown(
    server: MockServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = (400, {"error": {"message": "messages is too long. Send less", "type": "x"}})
    server.answer = lambda body: refusal if body["messages"][-1]["content"] == "long" else None
    assert said(monkeypatch, "long\nshort\n", server.url) == 1
    assert contents(server) == [["long"], ["short"]]
    assert "error: messages is too long. Send less" in capsys.readouterr().err


@pytest.mark.parametrize("last", [None, {"error": {"message": "the step failed", "type": "x"}}])
def test_an_answer_that_breaks_off_stays_and_is_an_error(
    last: dict[str, object] | None,
    server: MockServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.cut_after, server.last_words = 2, last
    assert said(monkeypatch, "one\ntwo\n", server.url) == 1
    printed = capsys.readouterr()
    assert contents(server)[1] == ["one", " x x", "two"]
    assert ("the step failed" if last else "the answer broke off") in printed.err


def test_ctrl_c_stops_only_the_answer_and_ctrl_d_leaves(
    server: MockServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [2]
    emit = chat.emit

    def interrupted(text: str, end: str = "\n") -> None:
        emit(text, end)
        if text == " x":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    monkeypatch.setattr(chat, "emit", interrupted)
    assert said(monkeypatch, "one\ntwo\n", server.url, stdin=Terminal) == 0
    assert contents(server)[1] == ["one", " x x", "two"]
    assert f"> {ANSWER[:4]} (stopped)\n> {ANSWER}\n> " in capsys.readouterr().out


def test_alone_it_asks_the_server_on_the_usual_port(server: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "LOCAL", server.url)
    assert said(monkeypatch, "one\n") == 0
    assert contents(server) == [["one"]]


def test_a_server_that_refuses_the_key_or_is_not_there_is_one_line(
    server: MockServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = (401, {})
    assert said(monkeypatch, "one\n", server.url) == 2
    assert said(monkeypatch, "one\n", "http://127.0.0.1:1") == 3
    key, address = capsys.readouterr().err.splitlines()
    assert "requires an API key" in key
    assert "cannot reach http://127.0.0.1:1" in address


@pytest.mark.process
def test_a_model_is_served_until_the_chat_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[subprocess.Popen[bytes]] = []
    stop = servers.stop
    monkeypatch.setattr(servers, "stop", lambda process: stopped.append(process) or stop(process))
    assert said(monkeypatch, "hello\n", "mock:llm-mock@1000") == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert "has no chat template" in printed.err
    assert "./eb chat smollm2" in printed.err
    assert [process.poll() for process in stopped] == [0]


@pytest.mark.process
def test_a_model_that_cannot_be_served_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, "hello\n", "smolm2") == 3
    assert "error: cannot start a server with smolm2: unknown model 'smolm2'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_it_waits_while_the_server_loads_its_model(
    server: MockServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = [503, 503, 200]
    asked: list[tuple[str, int]] = []

    real = requests.Session.get

    def get(session: requests.Session, url: str, **options: Any) -> requests.Response:
        if not url.endswith("/ready"):
            return real(session, url, **options)
        answer = requests.Response()
        answer.status_code = statuses.pop(0)
        asked.append((url, len(server.asked)))
        return answer

    monkeypatch.setattr(requests.Session, "get", get)
    assert said(monkeypatch, "one\n", server.url) == 0
    assert asked == [(f"{server.url}/ready", 0)] * 3
    assert capsys.readouterr().out == f"{ANSWER}\n"


@pytest.mark.parametrize("where", ["http://", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://a b"])
def test_what_is_no_address_is_said_in_one_line(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main([where]) == 2
    assert capsys.readouterr().err.startswith(f"error: {where!r} is not a server address")
