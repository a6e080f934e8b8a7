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
    started = [Server(folder / name, *arguments).start() for name in "ab"]
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.stop()


def with_front(servers: list[Server], test: Any) -> None:
    async def run() -> None:
        async with front(Fixed(*(f"http://127.0.0.1:{server.port}" for server in servers))) as one:
            await asyncio.wait_for(test(one), 60)

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
        stats = [json.loads((await front.get(f"/upstream/{name}/stats"))[1]) for name in "ab"]
        return sum(one["requests-running"] for one in stats)

    async def test(front: Front) -> None:
        asked = asyncio.create_task(front.post("/inference", {"prompt": "x", "num_tokens": 900, "stream": True}))
        while await running(front) == 0:
            assert not asked.done()
        asked.cancel()
        while await running(front):
            pass

    with_front(servers, test)


def test_a_killed_worker_costs_no_request_that_had_no_token(servers: list[Server]) -> None:
    """Whole answers are repeated elsewhere with the same text; streams that had begun end with one error."""
    fields = {"prompt": "hello", "num_tokens": 300, "seed": 5}

    async def test(front: Front) -> None:
        expected = json.loads((await front.post("/inference", fields))[1])["completion"]
        whole = [asyncio.create_task(front.post("/inference", fields)) for _ in range(8)]
        begun = [asyncio.create_task(front.post("/inference", fields | {"stream": True})) for _ in range(8)]
        await front.until(lambda: all(site.open == 8 for site in front.sites))
        await asyncio.sleep(0.2)
        os.kill(servers[0].workers[0], signal.SIGKILL)
        for status, body in await asyncio.gather(*whole):
            assert (status, json.loads(body)["completion"]) == (200, expected)
        ends = [body.split(b"\n\n")[-2] for _, body in await asyncio.gather(*begun)]
        failed = sum(b"unavailable_error" in end for end in ends)
        assert 1 <= failed <= 4  # the others had no token yet, or were at the other server
        assert ends.count(b"data: [DONE]") == 8 - failed

    with_front(servers, test)
