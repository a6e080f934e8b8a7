"""A queue as a process of its own: its access log, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from scripted import CHAT, Front, Scripted, connected, queueing, scripted

from integrations.queue import clients
from integrations.queue.server import Settings
from tests.support import ROOT, run_async
from tests.support.servers import free_port

BODY = {
    "messages": [{"role": "user", "content": "a secret question"}],
    "max_tokens": 3,
    "stream": True,
    "user": "alice",
}


@asynccontextmanager
async def process(
    upstream: Scripted, *flags: str, policy: str = "dynamic+vtc"
) -> AsyncIterator[tuple[Process, str, aiohttp.ClientSession]]:
    """Start a queue before an upstream, with no terminal."""
    port = free_port()
    command = [
        "-m",
        "integrations.queue",
        policy,
        "--upstream",
        upstream.url,
        "--slots",
        "2",
        "--port",
        str(port),
        *flags,
    ]
    started = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    try:
        assert started.stderr is not None
        assert b"queueing at" in await started.stderr.readline()
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get(f"http://127.0.0.1:{port}/health/live"):
                        break
                await asyncio.sleep(0.02)
            yield started, f"http://127.0.0.1:{port}", session
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


def test_each_request_is_one_line_of_json_with_its_upstream_and_without_its_text() -> None:
    async def run() -> None:
        async with scripted(2, 0.002) as upstream, process(upstream) as (queue, url, session):
            async with session.post(url + CHAT, json=BODY, headers={"X-Request-Id": "first"}) as answer:
                await answer.read()
            async with session.post(url + "/v1/nothing", json={}) as answer:
                assert answer.status == 404
            async with session.get(url + "/stats") as answer:
                assert answer.status == 200
            queue.send_signal(signal.SIGTERM)
            out, _ = await queue.communicate()
            chat, nothing, stats = map(json.loads, out.splitlines())
            assert (chat["id"], chat["client"], chat["route"], chat["status"]) == ("first", "alice", CHAT, 200)
            assert (chat["output_tokens"], chat["upstream"]) == (3, upstream.url.removeprefix("http://"))
            assert chat["seconds"] > chat["queue_s"] >= 0
            assert (nothing["status"], nothing["error"]) == (404, "not_found_error")
            assert (stats["route"], stats["status"]) == ("/stats", 200)
            assert b"secret" not in out

    run_async(asyncio.wait_for(run(), 180))


def test_the_access_log_can_be_turned_off() -> None:
    async def run() -> None:
        async with scripted(2, 0.002) as upstream, process(upstream, "--access-log", "off") as (queue, url, session):
            async with session.post(url + CHAT, json=BODY) as answer:
                await answer.read()
            queue.send_signal(signal.SIGTERM)
            assert (await queue.communicate())[0] == b""

    run_async(asyncio.wait_for(run(), 180))


def test_the_first_ctrl_c_waits_for_open_requests_and_the_second_does_not() -> None:
    async def run() -> None:
        async with scripted(2, 0.002) as upstream, process(upstream) as (queue, url, session):
            open = asyncio.create_task(session.post(url + CHAT, json={**BODY, "fault": "hang"}))
            while not upstream.seen:
                await asyncio.sleep(0.01)
            queue.send_signal(signal.SIGINT)
            assert queue.stderr is not None
            assert b"finishing 1 open" in await queue.stderr.readline()
            await asyncio.sleep(0.3)
            assert queue.returncode is None
            queue.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(queue.wait(), 60) == -signal.SIGINT
            with contextlib.suppress(aiohttp.ClientError):
                await open

    run_async(asyncio.wait_for(run(), 180))


def test_a_loop_that_dies_ends_the_process_with_a_status_that_supervisors_see(tmp_path: Path) -> None:
    failing = "def order(self, waiting, now):\n    raise RuntimeError\n\nPolicy.order = order  # of the policy to go back to, too\n"
    (tmp_path / "ends.py").write_text(f"from policies.dynamic import Policy\n\n{failing}")

    async def run() -> None:
        async with (
            scripted(2, 0.002) as upstream,
            process(upstream, policy=str(tmp_path / "ends.py")) as (queue, url, session),
        ):
            async with session.post(url + CHAT, json=BODY) as answer:
                assert answer.status == 503
            assert await asyncio.wait_for(queue.wait(), 60) == 1

    run_async(asyncio.wait_for(run(), 180))


def test_a_request_on_a_kept_connection_is_answered_until_the_queue_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "QUIET_SECONDS", 60.0)
    monkeypatch.setattr(clients, "LAST_SECONDS", 60.0)
    request = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode()

    async def run() -> None:
        async with scripted(1, 0.002) as upstream, contextlib.AsyncExitStack() as stack:
            front = await stack.enter_async_context(queueing([upstream], "dynamic", 1, Settings(), {}))
            async with connected(front) as (reader, writer):
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length[15:]))
                front.queue.draining = True
                ending = asyncio.create_task(stack.aclose())
                while not await refuses_connections(front):
                    await asyncio.sleep(0.005)
                writer.write(request)
                last = await reader.read()  # to the end: no more is answered on this connection
                assert last.startswith(b"HTTP/1.1 503")
                assert b"Connection: close" in last
                await ending

    run_async(asyncio.wait_for(run(), 180))


async def refuses_connections(front: Front) -> bool:
    try:
        async with connected(front):
            return False
    except ConnectionError:
        return True
