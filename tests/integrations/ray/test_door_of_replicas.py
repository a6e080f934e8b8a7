"""The queue as the face of several replicas: the policy that they share, which of them gets a request, and looks at one."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from made_up import ASK, GOOD, Front, behind, replicated, says, waits

from integrations.queue import menu, wire
from terminal.options import UsageError

REPORT = {"running": 0, "waiting": 0, "kv_used": 0.25, "prefill_tokens": 7, "slots": 3}


def notes(seen: list[Any]) -> Any:
    """Return a handler that notes each request, and answers all of them."""

    async def handle(request: web.Request) -> web.Response:
        fields = await request.json() if request.content_type == "application/json" else None
        seen.append((request.method, request.path, request.headers.get("Authorization"), fields))
        return web.json_response(GOOD)

    return handle


async def switch(front: Front, policy: str, **options: Any) -> tuple[int, dict[str, Any]]:
    key = {"Authorization": "Bearer k"}
    body = {"policy": policy, "options": options}
    async with front.session.put(front.url + "/policy", json=body, headers=key) as answer:
        return answer.status, await answer.json()


@replicated(says({}), says({}))
async def test_health_is_that_of_the_replicas_together(front: Front) -> None:
    front.sites[1].url = "http://127.0.0.1:9"
    status, body = await front.get("/health")
    answer = json.loads(body)
    assert (status, answer["status"]) == (200, "ok")
    assert "b cannot be reached" in answer["reason"]
    await front.only()
    await front.until(lambda: not front.sites)
    assert (await front.get("/ready"))[0] == 503
    assert (await front.get("/health/live"))[0] == 200


@replicated(says(GOOD | {"num_tokens": 4}), says(GOOD | {"num_tokens": 4}))
async def test_the_queue_tells_its_replicas_and_its_own_figures(front: Front) -> None:
    for _ in range(4):
        await front.post("/inference", ASK)
    await front.until(lambda: not front.queue.manager.inbox.open and not any(site.open for site in front.sites))
    assert [(one["name"], one["open"]) for one in json.loads((await front.get("/upstreams"))[1])] == [
        ("a", 0),
        ("b", 0),
    ]
    assert json.loads((await front.get("/stats"))[1])["requests"] == 4
    assert len(json.loads((await front.get("/slots"))[1])) == 2 * (8 + 1)
    assert b"eb_http_requests" in (await front.get("/metrics"))[1]


def test_the_replicas_get_the_loop_and_the_queue_the_order() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        assert front.queue.manager.policy_name == "static+priority"
        assert front.queue.manager.policy_options["aging"] == 5
        status, body = await switch(front, "chunked+sjf", predictor="noisy", max_batched_tokens=64)
        assert (status, body["policy"]) == (200, "chunked+sjf")
        assert not front.queue.manager.policy.closed  # type: ignore[union-attr]

    words = ("--policy-option", "aging=5", "--api-key", "k")
    behind(test, notes(seen), notes(seen), policy="static+priority", words=words)
    assert seen == [("PUT", "/policy", "Bearer k", {"policy": "chunked", "options": {"max_batched_tokens": 64}})] * 2


@pytest.mark.parametrize("policy", ["none", "dynamic+srpt", "dynamic+none"])
def test_a_switch_to_a_wrong_policy_reaches_no_replica(policy: str) -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        assert (await switch(front, policy))[0] == 400
        assert (await switch(front, "dynamic", none=1))[0] == 400

    behind(test, notes(seen))
    assert seen == []


def test_a_switch_without_the_key_reaches_no_replica() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        assert (await switch(front, "dynamic"))[0] == 401

    behind(test, notes(seen), words=("--api-key", "other"))
    assert seen == []


def test_a_switch_reaches_a_replica_that_starts_later_before_its_first_request() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        await front.only("a")
        assert (await switch(front, "static"))[0] == 200
        await front.only("b")
        answers = await asyncio.gather(*(front.post("/inference", ASK) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3

    behind(test, says({}), notes(seen))
    assert seen[0][:2] == ("PUT", "/policy")
    assert [path for _, path, *_ in seen[1:]] == ["/inference"] * 3


def test_a_replica_that_comes_back_is_told_the_policy_again() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        assert (await switch(front, "static"))[0] == 200
        await front.only("b")
        await front.only("a", "b")

    behind(test, notes(seen), says({}))
    assert [fields for _, path, _, fields in seen if path == "/policy"] == [{"policy": "static", "options": {}}] * 2


@replicated(says({"error": {}}, 400), says(GOOD))
async def test_a_replica_that_refuses_the_policy_gets_no_request(front: Front) -> None:
    assert (await switch(front, "static"))[0] == 200
    assert [site.name for site in front.sites] == ["b"]
    assert (await front.post("/inference", ASK))[0] == 200


def test_a_policy_of_the_users_own_goes_to_both_as_it_is(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from scheduling import policy\nclass Policy(policy.Policy):\n    pass\n")
    assert menu.divided(str(file), {"a": 1}) == ((str(file), {"a": 1}), (str(file), {"a": 1}))
    assert menu.divided("nobatch", {}) == (("nobatch", {}), ("dynamic", {}))


def test_an_order_that_needs_the_cache_is_refused_at_the_start() -> None:
    async def test(front: Front) -> None:
        pass

    with pytest.raises((UsageError, ValueError), match="cached"):
        behind(test, says({}), policy="dynamic+lpm")


def test_a_report_bounds_the_requests_of_a_replica_and_tells_routers_more() -> None:
    release = asyncio.Event()

    async def test(front: Front) -> None:
        front.fleet.reports = {"a": REPORT}
        await front.queue.refresh()
        assert (front.sites[0].kv_free, front.sites[0].prefill_tokens) == (0.75, 7)
        requests = [asyncio.create_task(front.post("/inference", ASK)) for _ in range(6)]
        await front.until(lambda: front.queue.manager.waiting == 2)
        await front.until(lambda: front.sites[0].open == 4)  # one more than its slots
        release.set()
        await asyncio.gather(*requests)

    behind(test, waits(release))


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_a_request_for_more_answers_than_any_replica_has_slots_goes_to_an_idle_one(policy: str) -> None:
    async def test(front: Front) -> None:
        front.fleet.reports = {"a": REPORT | {"slots": 1}}
        await front.queue.refresh()
        bodies = [{"prompt": "x", "n": n} for n in (1, 4, 1, 20)]
        answers = await asyncio.gather(*(front.post("/v1/completions", fields) for fields in bodies))
        assert [status for status, _ in answers] == [200] * 4

    behind(test, says(GOOD), policy=policy)


def test_a_router_counts_each_answer_of_a_request() -> None:
    release = asyncio.Event()

    async def test(front: Front) -> None:
        requests = [asyncio.create_task(front.post("/v1/completions", {"prompt": "x", "n": 4}))]
        await front.until(lambda: sum(site.open for site in front.sites))
        other = next(site for site in front.sites if not site.open)
        requests += [asyncio.create_task(front.post("/v1/completions", {"prompt": "x"})) for _ in range(3)]
        await front.until(lambda: sum(site.open for site in front.sites) == 4)
        assert other.open == 3
        release.set()
        await asyncio.gather(*requests)

    behind(test, waits(release), waits(release), words=("--router", "least-loaded"))


@pytest.mark.parametrize("router", ["prefix-aware", "session-sticky"])
def test_a_router_sends_what_belongs_together_to_one_replica(router: str) -> None:
    seen: list[list[Any]] = [[], [], []]

    async def test(front: Front) -> None:
        for i in range(12):
            fields = {"prompt": f"{i % 2}" * 600 + str(i), "num_tokens": 4, "user": str(i % 2)}
            assert (await front.post("/inference", fields))[0] == 200

    behind(test, *(says(GOOD, seen=some) for some in seen), words=("--router", router))
    places = [{i for i, some in enumerate(seen) if any(fields["user"] == user for fields in some)} for user in "01"]
    assert [len(some) for some in places] == [1, 1]


def test_a_connection_to_a_replica_asks_whether_its_machine_is_there() -> None:
    address = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)[0]
    with wire.probing(address) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == wire.IDLE


@pytest.mark.parametrize("prefix", ["/upstream", "/replica"])
def test_a_path_names_a_replica_and_may_only_look(prefix: str) -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        assert (await front.get(f"{prefix}/b/stats?last=3"))[0] == 200
        for path in (f"{prefix}/c/stats", f"{prefix}/b/../stats"):
            assert (await front.get(path))[0] == 404
        assert (await front.post(f"{prefix}/b/inference", ASK))[0] == 404

    behind(test, says({}), says({}, seen=seen))
    assert seen == ["/stats?last=3"]


def test_the_steps_of_a_replica_that_dies_just_end() -> None:
    passed = asyncio.Event()

    async def dies(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: {}\n\n")
        await passed.wait()
        assert request.transport is not None
        request.transport.close()
        return answer

    async def test(front: Front) -> None:
        async with front.session.get(front.url + "/upstream/a/events") as answer:
            assert (answer.status, await answer.content.readexactly(10)) == (200, b"data: {}\n\n")
            passed.set()
            assert await answer.read() == b""

    behind(test, dies)


@pytest.mark.parametrize(("method", "path", "passes"), [
    ("GET", "/v1/models/x", True), ("POST", "/tokenize", True), ("POST", "/v1/messages/count_tokens", True),
    ("POST", "/api/show", True), ("POST", "/v1/load_lora_adapter", False), ("DELETE", "/v1/files/x", False),
    ("POST", "/load", False), ("GET", "/openapi.json", True),
])  # fmt: skip
def test_what_changes_one_replica_alone_is_not_passed_on(method: str, path: str, passes: bool) -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        async with front.session.request(method, front.url + path, json={"a": 1}) as answer:
            assert answer.status == (200 if passes else 404)

    behind(test, notes(seen))
    assert [one[1] for one in seen] == [path] * passes


def test_replicas_lease_no_policy_and_keep_theirs() -> None:
    seen: list[Any] = []

    async def test(front: Front) -> None:
        key = {"Authorization": "Bearer k"}
        body = {"policy": "chunked+sjf", "for_s": 20}
        async with front.session.put(front.url + "/policy", json=body, headers=key) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "for_s")

    behind(test, notes(seen), notes(seen), words=("--api-key", "k"))
    assert seen == []
