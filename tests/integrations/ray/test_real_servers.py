"""The queue of a fleet in front of two real servers with a mock model: the same bytes as from one server, and what a kill does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from made_up import Fixed, Front, front

from tests.support import run_async
from tests.support.faults import arming
from tests.support.servers import Server

pytestmark = pytest.mark.process
# What differs between two answers to one request: ids and times, TGI's seconds in a header among them.
OWN = re.compile(rb'"(id|created|timings|cached_tokens)":("[^"]*"|\d+|\{[^}]*\})')
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 5, "seed": 3}
REQUESTS = [
    ("POST", "/inference", {"prompt": "hello", "num_tokens": 5, "seed": 3}),
    ("POST", "/inference", {"prompt": "hello", "num_tokens": 0}),
    ("POST", "/inference", {"prompt": "hello", "num_tokens": 1, "seed": 3, "stream": True, "unknown": 1}),
    ("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 5, "seed": 3, "logprobs": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"tools": 1}),
    ("POST", "/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 5, "seed": 3, "do_sample": True}}),
    ("POST", "/generate", {"inputs": "", "parameters": {}}),
    (
        "POST",
        "/generate_stream",
        {"inputs": "hello", "parameters": {"max_new_tokens": 5, "seed": 3, "do_sample": True}},
    ),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("GET", "/v1/models/none", None),
    ("GET", "/openapi.json", None),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("fleet")
    arguments = ["dynamic", "--model", "mock:llm-mock@20", "--access-log", "off"]
    slow = arming({"slow_step": {"ms": 100, "prompt_contains": "SLOWLY"}})  # at the first one alone
    started = [Server(folder / name, *arguments, **more).start() for name, more in (("a", slow), ("b", {}))]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.stop()


def with_front(servers: list[Server], test: Any) -> None:
    async def run() -> None:
        async with front(Fixed(*(f"http://127.0.0.1:{server.port}" for server in servers))) as one:
            await asyncio.wait_for(test(one), 120)

    run_async(run())


def test_every_dialect_gives_the_bytes_of_one_server(servers: list[Server]) -> None:
    async def ask(front: Front, url: str, method: str, path: str, fields: Any) -> tuple[int, bytes, str | None]:
        async with front.session.request(method, url + path, json=fields) as answer:
            return answer.status, OWN.sub(b"", await answer.read()), answer.headers.get("X-Ignored-Params")

    async def test(front: Front) -> None:
        for request in REQUESTS:
            direct = await ask(front, f"http://127.0.0.1:{servers[0].port}", *request)
            assert await ask(front, front.url, *request) == direct, request

    with_front(servers, test)


def test_a_switch_of_the_policy_reaches_the_servers(servers: list[Server]) -> None:
    async def test(front: Front) -> None:
        for policy in ("static+edf", "dynamic"):
            async with front.session.put(front.url + "/policy", json={"policy": policy}) as answer:
                assert (answer.status, (await answer.json())["policy"]) == (200, policy)
            loops = [json.loads((await front.get(f"/upstream/{name}/stats"))[1])["policy"] for name in "ab"]
            assert loops == [policy.partition("+")[0]] * 2
            assert (await front.post("/inference", {"prompt": "hello", "num_tokens": 2}))[0] == 200

    with_front(servers, test)


def test_a_client_that_leaves_frees_its_slot(servers: list[Server]) -> None:
    async def running(front: Front) -> int:
        return int(json.loads((await front.get("/upstream/a/stats"))[1])["requests-running"])

    async def test(front: Front) -> None:
        await front.only("a")
        request = asyncio.create_task(front.post("/inference", {"prompt": "SLOWLY", "num_tokens": 900, "stream": True}))
        while await running(front) == 0:
            assert not request.done()
        request.cancel()
        while await running(front):
            pass

    with_front(servers, test)


def test_a_killed_worker_costs_no_request_that_had_no_token(servers: list[Server]) -> None:
    """Whole answers are repeated elsewhere with the same text; streams that had begun end with one error."""
    fields = {"prompt": "SLOWLY", "num_tokens": 300, "seed": 5}
    begun: list[str] = []  # the replica of each stream that has a token

    async def stream(front: Front) -> bytes:
        async with front.session.post(front.url + "/inference", json=fields | {"stream": True}) as answer:
            body = b""
            while b"data: " not in body:
                body += await answer.content.readany()
            begun.append(answer.headers["X-Upstream"])
            return body + await answer.read()

    async def test(front: Front) -> None:
        async with front.session.post(f"http://127.0.0.1:{servers[1].port}/inference", json=fields) as answer:
            expected = (await answer.json())["completion"]
        whole = [asyncio.create_task(front.post("/inference", fields)) for _ in range(8)]
        await front.until(lambda: front.sites[0].open == 4)
        streams = [asyncio.create_task(stream(front)) for _ in range(8)]
        await front.until(lambda: begun.count("a") == 4)
        os.kill(servers[0].workers[0], signal.SIGKILL)
        for status, body in await asyncio.gather(*whole):
            assert (status, json.loads(body)["completion"]) == (200, expected)
        ends = [body.split(b"\n\n")[-2] for body in await asyncio.gather(*streams)]
        assert sum(b"unavailable_error" in end for end in ends) == ends.count(b"data: [DONE]") == 4

    with_front(servers, test)
