"""How much a queue reads of a body, believes of an upstream, and holds while requests wait."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted import CHAT, Front, before, queued

from integrations.queue.server import Settings

MB = 1 << 20
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TEXT = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def picture(size: int, **fields: object) -> bytes:
    """Return a chat with a picture of this size; some clients escape each slash."""
    url = "data:image/png;base64," + "iVBOR/w0".replace("/", "\\/") * (size // 9)
    content = [{"type": "text", "text": "one two"}, {"type": "image_url", "image_url": {"url": "URL"}}]
    whole = json.dumps({"messages": [{"role": "user", "content": content}], **fields})
    return whole.replace("URL", url).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"x": [' + b"[]," * (31 * MB // 3) + b"0]}", 413),
        (b'{"messages": "' + b"ab " * (9 * MB // 3) + b'"}', 413),
        (b'{"prompt": [' + b"1," * 200_000 + b"1]}", 400),
        (b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"x": {' + b'"a": {}, ' * 20_000 + b'"b": 1}}', 400),
    ],
    ids=["lists", "text", "numbers", "depth", "keys"],
)
@queued()
async def test_a_body_with_more_in_it_than_any_model_reads_is_refused(front: Front, body: bytes, status: int) -> None:
    answer = await front.send("POST", CHAT, {"Content-Type": "application/json"}, body)
    assert (answer.status, answer.json["error"]["type"]) == (status, "invalid_request_error")
    assert "limit" in answer.text or "levels" in answer.text
    assert front.upstream.seen == []


@queued()
async def test_a_picture_of_30_mb_passes_byte_for_byte_and_is_no_text(front: Front) -> None:
    body = picture(30 * MB, max_tokens=2, model="m", tag="p")
    front.hold()
    sending = asyncio.create_task(front.send("POST", CHAT, {"X-Request-Id": "p"}, body))
    await front.until(lambda: front.upstream.seen)
    ((tag, _, seen, _),) = front.upstream.seen
    assert tag == "p" and seen == body  # noqa: PT018  a difference of 30 MB would be printed
    (seq,) = front.queue.manager.inbox.open
    assert (seq.adapter, len(seq.prompt_ids) < 10_000) == ("m", True)
    front.go()
    assert (await sending).status == 200


@pytest.mark.parametrize("policy", ["dynamic+vtc", "dynamic+vtc-pred"])
def test_an_answer_in_one_piece_costs_its_client_as_much_as_a_stream(policy: str) -> None:
    async def test(front: Front) -> None:
        counters = front.queue.manager.each[0].scheduler.policy.counters  # type: ignore[attr-defined]
        paid = [0.0]
        for streams in (True, False):
            await front.ask(user="a", max_tokens=40, stream=streams)
            await front.until(lambda: front.idle)
            paid.append(counters["a"])
        assert paid[2] - paid[1] == pytest.approx(paid[1], abs=2)

    before(test, policy, step=0.001)


@pytest.mark.parametrize("count", [10**7, 10**308, -1])
@queued()
async def test_a_count_that_cannot_be_right_is_believed_by_nothing(front: Front, count: int) -> None:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": count}})
    for _ in range(2):
        answer = await front.ask(fault="raw", bytes=f"{STREAM}{TEXT * 3}data: {usage}\n\n")
        assert answer.text.count("content") == 3
    await front.until(lambda: front.idle)
    meters = front.queue.service.meters
    assert meters.generation_tokens <= 2 * len(answer.text)
    assert meters.prompt_tokens < 1000
    assert (await front.ask(max_tokens=2)).status == 200


@queued(settings=Settings(idle=20.0, waiting_bytes=3 * MB))
async def test_bodies_that_wait_have_a_budget_and_leave_it_with_their_clients(front: Front) -> None:
    tasks = await front.occupied(1)
    large = picture(MB, tag="large")
    waiting = [asyncio.create_task(front.send("POST", CHAT, None, large)) for _ in range(2)]
    await front.until(lambda: len(front.queue.manager.queued) == 2)
    refused = await front.send("POST", CHAT, None, large)
    assert (refused.status, int(refused.headers["Retry-After"]) > 0) == (429, True)
    assert (await front.send("POST", CHAT, None, picture(4 * MB))).status == 413
    waiting[0].cancel()
    await front.until(lambda: len(front.queue.manager.queued) == 1)
    waiting[0] = asyncio.create_task(front.send("POST", CHAT, None, large))
    await front.until(lambda: len(front.queue.manager.queued) == 2)
    front.go()
    assert [(await task).status for task in (*waiting, *tasks)] == [200, 200, 200]


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "HTTP/1.1 000 Zero\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
@queued()
async def test_heads_that_end_no_request_are_502(front: Front, head: str) -> None:
    assert (await front.ask(fault="raw", bytes=head)).status == 502
    assert (await front.ask(max_tokens=2)).status == 200
