"""`./eb vllm serve`, what it puts on vLLM's path, and the middleware of vLLM's API."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from integrations.vllm import serve
from integrations.vllm.middleware import Middleware, marked
from tests.support import ROOT


def test_vllm_becomes_the_process_with_the_policy_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(serve, "version", lambda name: "0.32.0+cpu")
    monkeypatch.setattr(serve.os, "execve", lambda *given: seen.append(given))
    serve.main(["m", "--policy", "dynamic+drr", "--policy-option", "quantum=64", "--port", "1"])
    _, command, environment = seen[0]
    assert command[2:6] == ["serve", "m", "--port", "1"]
    settings = json.loads(environment["EB_VLLM"])
    assert (settings["policy"], settings["options"]) == ("dynamic+drr", {"quantum": "64"})


@pytest.mark.parametrize(
    ("found", "line", "message"),
    [
        ("0.33.0", [], "--untested"),
        ("0.32.1", ["--policy", "dynamo"], "'dynamic'"),
        ("0.32.1", ["--policy-option", "x"], "NAME=VALUE"),
    ],
)
def test_what_would_go_wrong_later_is_told_at_once(
    found: str, line: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "version", lambda name: found)
    with pytest.raises(SystemExit):
        serve.main(["m", *line])
    assert message in capsys.readouterr().err


def test_only_three_rooms_are_found_from_vllms_path() -> None:
    code = (
        "import sys; sys.path.insert(0, 'integrations/vllm/entry'); import eb_vllm, policies, integrations.vllm.failsafe; from importlib.util import find_spec; "
        "print(find_spec('config'), find_spec('simulate'), policies.names()[0], eb_vllm.Middleware.__name__)"
    )
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split() == ["None", "None", "adaptive", "Middleware"]


@pytest.mark.parametrize(
    ("fields", "headers", "hints"),
    [
        ({"user": "alice"}, {}, {"client": "alice"}),
        ({"user": "alice", "slo_s": 3}, {"x-client": "bob"}, {"client": "bob", "slo_s": 3.0}),
        ({"program": "p"}, {"x-program-id": "q"}, {"program": "p"}),
        ({"vllm_xargs": {"program": "o"}, "program": "p"}, {}, {"program": "o"}),
        ({"program": 3}, {"x-claude-code-session-id": "s"}, {"program": "s"}),
        ({"vllm_xargs": {"a": 1}, "slo_s": "soon"}, {"authorization": "Bearer k"}, {"a": 1, "client": "key-45c3a1c5"}),
    ],
)
def test_a_body_tells_the_scheduler_who_sent_it(fields: Any, headers: dict[str, str], hints: dict[str, Any]) -> None:
    marks = json.loads(marked(json.dumps(fields).encode(), headers))["vllm_xargs"]
    assert marks.keys() == hints.keys()
    assert all(
        marks[name] == value for name, value in hints.items() if name != "client" or not headers.get("authorization")
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"vllm_xargs": 3, "user": "a"}', b'{"user": 3}'])
def test_any_other_body_passes_unchanged(body: bytes) -> None:
    assert marked(body, {}) == body


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"!"},%b}]}\n\n'
REASONS = b'"finish_reason":"abort","stop_reason":"refused_by_policy"'


def answer(*bodies: bytes) -> list[dict[str, Any]]:
    """Return what the middleware sends for an app's answer."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": body.startswith(b"data: ")})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Middleware(app)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    "bodies",
    [
        [CHUNK % REASONS, b"data: [DONE]"],
        [b'data: {"delta":{"role":"assistant","content":""}}', CHUNK % REASONS],
        [(CHUNK % REASONS).removeprefix(b"data: ")],
        [b"data: [DONE]"],
    ],
)
def test_a_refused_request_gets_429_and_an_error(bodies: list[bytes]) -> None:
    sent = answer(*bodies)
    assert [message.get("status") for message in sent] == [429, None]
    assert json.loads(sent[1]["body"])["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    "first",
    [
        b"data: 1\n\n",
        b"data: refused_by_policy\n\n",
        CHUNK % b'"finish_reason":null,"text":"refused_by_policy"',
        CHUNK % b'"finish_reason":"stop","stop_reason":"refused_by_policy"',
    ],
)
def test_any_other_answer_passes_as_it_comes(first: bytes) -> None:
    sent = answer(first, CHUNK % REASONS)
    assert [message.get("body") for message in sent] == [None, first, CHUNK % REASONS]


def test_a_chat_without_any_text_is_answered() -> None:
    whole = b'{"choices":[{"message":{"role":"assistant","content":""},"finish_reason":"stop"}]}'
    assert [message.get("body") for message in answer(whole)] == [None, whole]
