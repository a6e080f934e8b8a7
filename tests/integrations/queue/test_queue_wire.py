"""What passes the queue and what does not: routes, bytes, headers, keys, hints, and requests that try to smuggle another."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from typing import Any

import pytest
from scripted import CHAT, OWN, SECRET, Answer, Front, before, connected, queued

from integrations.queue.server import Settings

BODY = json.dumps({"messages": [], "max_tokens": 2, "stream": True, "tag": "raw"}).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
LENGTH = f"Content-Length: {len(BODY)}\r\n".encode()
SECOND = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
# Each would be read as one request by some servers and as another, or as two, by others.
SMUGGLED = {
    "length and chunks": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
    "chunks and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SECOND,
    "two lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "two equal lengths": HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
    "two lengths in one": HEAD + b"Content-Length: 4, 4\r\n\r\nabcd",
    "a length with a sign": HEAD + b"Content-Length: +4\r\n\r\nabcd",
    "a length below zero": HEAD + b"Content-Length: -4\r\n\r\nabcd",
    "a length in hexadecimal": HEAD + b"Content-Length: 0x4\r\n\r\nabcd",
    "a length with an underscore": HEAD + b"Content-Length: 1_0\r\n\r\nabcdefghij",
    "an empty length": HEAD + b"Content-Length: \r\n\r\n",
    "a length before a space": HEAD + b"Content-Length : 4\r\n\r\nabcd",
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks before an unknown coding": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunks twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two codings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a coding after a control character": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a coding before a space": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a header in two lines": HEAD + b"X-A: 1\r\n\tb\r\nContent-Length: 2\r\n\r\n{}",
    "a lone line feed in a header": HEAD + b"X-A: 1\nContent-Length: 2\r\n\r\n{}",
    "a lone carriage return in a header": HEAD + b"X-A: 1\rContent-Length: 2\r\n\r\n{}",
    "a null in a header": HEAD + b"X-A: \x00\r\nContent-Length: 2\r\n\r\n{}",
    "a name with a control character": HEAD + b"X\x01A: 1\r\nContent-Length: 2\r\n\r\n{}",
    "chunks of a negative size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-4\r\nabcd\r\n0\r\n\r\n",
    "chunks of no size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabcd\r\n0\r\n\r\n",
    "a chunk without its end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcdXX0\r\n\r\n",
}
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED |= {
    "a chunk size with a sign": CHUNKED + b"+4\r\nabcd\r\n0\r\n\r\n",
    "a chunk size with a prefix": CHUNKED + b"0x4\r\nabcd\r\n0\r\n\r\n",
    "a chunk size with an underscore": CHUNKED + b"0_4\r\nabcd\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": CHUNKED + b"ffffffffffffffff4\r\nabcd\r\n0\r\n\r\n",
    "a chunk size before a space": CHUNKED + b"4 \r\nabcd\r\n0\r\n\r\n",
    "a line feed after a chunk's extension": CHUNKED + b"4;a\nabcd\r\n0\r\n\r\n",
    "chunks in lines that end with a line feed": CHUNKED + b"4\nabcd\n0\n\n",
    "a length after the chunks": CHUNKED + b"4\r\nabcd\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a head in lines that end with a line feed": (HEAD + LENGTH).replace(b"\r\n", b"\n") + b"\n" + BODY,
    "a length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nabcd",
    "two hosts": HEAD + b"Host: y\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": HEAD.replace(b"Host: localhost\r\n", b"") + LENGTH + b"\r\n" + BODY,
    "a target with a space": HEAD.replace(b" HTTP", b" x HTTP") + LENGTH + b"\r\n" + BODY,
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"4\r\nabcd\r\n0\r\n\r\n",
}
# These have one meaning, but some servers read them otherwise: they may pass, with the framing of the queue alone.
ODD = {
    "zeros before a length": HEAD + b"Content-Length: 000%d\r\n\r\n" % len(BODY) + BODY,
    "spaces around a length": HEAD + b"Content-Length:  %d \r\n\r\n" % len(BODY) + BODY,
    "zeros before a chunk size": CHUNKED + b"%032x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "a chunk's extension": CHUNKED + b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "another case": CHUNKED.replace(b"chunked", b"CHUNKED") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "a connection that names the length": HEAD + b"Connection: content-length\r\n" + LENGTH + b"\r\n" + BODY,
    "a length with an underscore in its name": HEAD + b"Content_Length: 3\r\n" + LENGTH + b"\r\n" + BODY,
    "a coding with an underscore in its name": HEAD + b"Transfer_Encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "an upgrade": HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n" + BODY,
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integrations.queue.clients.LINGER_SECONDS", 0.05)


async def raw(front: Front, data: bytes) -> bytes:
    """Return what comes back for these bytes until the connection ends or is silent after an answer."""
    async with connected(front) as (reader, writer):
        writer.write(data)
        answer = b""
        while True:
            try:
                piece = await asyncio.wait_for(reader.read(65536), 0.3 if answer else 60)
            except asyncio.TimeoutError:
                return answer
            if not piece:
                return answer
            answer += piece


def test_40_forms_of_smuggling_a_request_are_refused() -> None:
    assert len(SMUGGLED) == 40

    async def test(front: Front) -> None:
        answers = await asyncio.gather(*(raw(front, data) for data in SMUGGLED.values()))
        passed = {
            name: answer[:40] for name, answer in zip(SMUGGLED, answers)
            if answer.split(b" ")[1:2] not in ([b"400"], [b"501"]) or len(re.findall(rb"HTTP/1\.\d \d{3} ", answer)) != 1
        }  # fmt: skip
        assert passed == {}
        assert front.upstream.seen == []

    before(test, slots=4)


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
@queued(slots=4)
async def test_an_odd_form_reaches_the_upstream_with_one_meaning(front: Front, data: bytes) -> None:
    assert (await raw(front, data)).count(b"HTTP/1.1 200 ") == 1
    ((_, head, body, path),) = front.upstream.seen
    framing = {name: value for name, value in head.items() if re.search("(?i)length|transfer|upgrade|conn", name)}
    assert (framing, body, path) == ({"Content-Length": str(len(BODY))}, BODY, CHAT)


@pytest.mark.parametrize(
    "target",
    ["http://10.0.0.1:99/v1/chat/completions", "//10.0.0.1/v1/chat/completions", "/@10.0.0.1/v1", "/v1/../../log",
     "/v1/%2e%2e/log", "/v1/chat%2Fcompletions", "/api/pull", "/v1/load_lora_adapter", "/slots/0?action=save", "/load"],
)  # fmt: skip
@queued()
async def test_only_known_paths_reach_the_upstream_that_the_command_line_names(front: Front, target: str) -> None:
    answer = await raw(
        front, f"POST {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode() + LENGTH + b"\r\n" + BODY
    )
    # An absolute form has the path of a known route, so it goes to the upstream, whatever host it names.
    is_known = target.startswith("http://")
    assert answer.split(b" ")[1] == (b"200" if is_known else b"404")
    assert [path for *_, path in front.upstream.seen] == ([CHAT] if is_known else [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/delete"),
        ("PUT", CHAT),
        ("GET", CHAT),
        ("GET", "/upstream/u0/../x"),
        ("POST", "/upstream/u0/api/pull"),
    ],
)
@queued()
async def test_no_other_method_reaches_the_upstream(front: Front, method: str, path: str) -> None:
    answer = await raw(
        front, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert answer.split(b" ")[1] in (b"404", b"405")
    assert front.upstream.seen == []


@queued()
async def test_looks_at_the_upstream_pass_at_once(front: Front) -> None:
    (first,) = await front.occupied(1)
    assert (await front.send("GET", "/v1/models")).json["data"] == [{"id": "fake"}]
    assert (await front.send("GET", "/upstream/u0/slots?x=1")).status == 200
    assert front.upstream.seen[-1][3] == "/slots?x=1"
    for path in ("/v1/messages/count_tokens", "/api/show"):
        assert (await front.send("POST", path, None, b'{"fault": "500"}')).text == '{"error": "boom"}'
    assert not first.done()
    front.go()
    await first


@queued(settings=Settings(key=SECRET))
async def test_the_upstreams_key_reads_nothing_of_its_owners_account(front: Front) -> None:
    assert (await front.send("GET", "/upstream/u0/slots")).status == 200
    assert (await front.send("GET", "/upstream/u0/v1/files")).status == 404
    assert all(path != "/v1/files" for *_, path in (seen[:4] for seen in front.upstream.seen))


@queued()
async def test_a_body_goes_on_byte_for_byte_compressed_or_in_chunks(front: Front) -> None:
    odd = b'{ "max_tokens" :2,\n"x": "\\u00e9", "tag": "odd" }'
    await front.send("POST", f"{CHAT}?beta=true", {"Content-Type": "application/json"}, odd)
    packed = gzip.compress(BODY)
    await front.send("POST", CHAT, {"Content-Encoding": "gzip"}, packed)
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    await raw(front, HEAD + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n" + chunks)
    # The scripted upstream unpacks what is packed.
    assert [body for _, _, body, _ in front.upstream.seen] == [odd, BODY, BODY]
    heads = [{name.lower(): value for name, value in head.items()} for _, head, _, _ in front.upstream.seen]
    assert front.upstream.seen[0][3] == f"{CHAT}?beta=true"
    assert heads[1]["content-length"] == str(len(packed))
    assert "transfer-encoding" not in heads[2]
    assert "expect" not in heads[2]


def test_headers_about_one_connection_and_hints_end_at_the_queue() -> None:
    sent = {"Connection": "X-Foo, keep-alive", "X-Foo": "1", "X-Queue-Client": "alice", "X-Stainless": "y", "TE": "trailers",
            "Authorization": "Bearer client-key"}  # fmt: skip

    async def test(front: Front) -> None:
        answer = await front.ask(sent, tag="x", max_tokens=2)
        (seen,) = ({name.lower(): value for name, value in head.items()} for _, head, _, _ in front.upstream.seen)
        assert not {"x-foo", "te", "x-queue-client"} & set(seen)
        assert (seen["x-stainless"], seen["authorization"]) == ("y", "Bearer client-key")
        assert seen["host"] == front.upstream.url.removeprefix("http://")
        assert answer.status == 200, answer.text
        assert answer.headers["X-Upstream"] == "u0"
        assert 0 <= float(answer.headers["X-Queue-Wait"]) < 20
        await front.until(lambda: front.idle)
        timeline = await front.send("GET", f"/requests/{answer.headers['X-Request-Id']}")
        assert timeline.json["output_tokens"] == 2

    before(test)


def test_no_key_passes_whatever_is_asked_and_however_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(0)
    names = ["Authorization", "X-Api-Key", "Api-Key", "Proxy-Authorization", "Cookie", "X-Other", "Referer"]
    forms = ["{}", "Bearer {}", "key={}; a=b", "Basic {}"]
    faults = ["", "", "429", "500", "html", "redirect", "close", "midclose", "miderror", "cut", "echo"]

    async def test(front: Front) -> None:
        log: list[Any] = []
        front.queue.service.serves = True
        front.queue.service.access_log.write = log.append  # type: ignore[method-assign]
        got: list[Answer] = []
        for i in range(60):
            keys = {name: draw.choice(forms).format(OWN) for name in draw.sample(names, 3)}
            keys = {**keys, "Authorization": f"Bearer {OWN}" if i % 6 else "Bearer wrong"}
            streams, fault = draw.random() < 0.5, draw.choice(faults)
            path = draw.choice([CHAT, "/v1/completions", "/api/chat", "/generate", "/v1/messages", "/v1/nothing"])
            got.append(await front.ask(keys, path, fault=fault, after=0.01, stream=streams, max_tokens=5))
        pages = [
            "/",
            "/stats",
            "/metrics",
            "/policy",
            "/slots",
            "/health",
            "/requests/x",
            "/queue/position?id=x",
            "/upstream/x/y",
        ]
        got += [await front.send("GET", page, {"Authorization": f"Bearer {OWN}"}) for page in pages]
        got.append(await front.send("GET", "/events?detail=1", {"X-Api-Key": OWN}, leaves_after=1))
        shown = "".join(answer.text + str(answer.headers) for answer in got) + json.dumps(log) + caplog.text
        assert len(log) > 60
        assert SECRET not in shown
        assert OWN not in shown + str(front.upstream.seen)
        assert {head.get("Authorization") for _, head, _, _ in front.upstream.seen} == {f"Bearer {SECRET}"}

    before(test, slots=4, api_key=OWN, settings=Settings(key=SECRET, idle=20.0))


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key", "X-Other"])
@queued(api_key=OWN, settings=Settings(key=SECRET))
async def test_the_key_of_the_queue_never_reaches_the_upstream_and_no_key_of_the_upstream_a_client(
    front: Front, header: str
) -> None:
    value = f"Bearer {OWN}" if header == "Authorization" else OWN
    keys = {"Authorization": f"Bearer {OWN}", header: value}
    answer = await front.ask(keys, max_tokens=2)
    models = await front.send("GET", "/v1/models", keys)
    pages = [await front.send("GET", path, keys) for path in ("/stats", "/metrics", "/policy", "/slots")]
    assert {one.status for one in (answer, models, *pages)} == {200}
    for _, head, body, path in front.upstream.seen:
        assert head["Authorization"] == f"Bearer {SECRET}"
        assert OWN not in json.dumps(head) + path + body.decode()
    assert SECRET not in "".join(one.text + str(one.headers) for one in (answer, *pages))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/stats"),
        ("GET", "/queue/position?id=x"),
        ("GET", "/upstream/u0/slots"),
    ],
)
@queued(api_key=OWN)
async def test_a_client_without_the_key_gets_nothing(front: Front, method: str, path: str) -> None:
    assert (await front.send(method, path, None, BODY if method == "POST" else b"")).status == 401
    assert (
        await front.send(method, path, {"Authorization": "Bearer wrong"}, BODY if method == "POST" else b"")
    ).status == 401
    assert front.upstream.seen == []


@pytest.mark.parametrize("hosts", ["", "queue.example"])
def test_pages_of_other_sites_reach_nothing(hosts: str) -> None:
    async def test(front: Front) -> None:
        for header, status in [
            ({"Sec-Fetch-Site": "cross-site"}, 403), ({"Sec-Fetch-Site": "same-site"}, 403), ({"Host": "evil.example"}, 403),
            ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Content-Type": "text/plain"}, 415),
        ]:  # fmt: skip
            assert (await front.ask(header)).status == status, header
        assert "--trusted-hosts" in (await front.ask({"Host": "evil.example"})).text
        assert front.upstream.seen == []
        for own in ({"Origin": front.url}, {"Host": "a.localhost:8600"}, {"Sec-Fetch-Site": "same-origin"}):
            assert (await front.ask(own, max_tokens=2)).status == 200, own

    before(test, trusted_hosts=hosts)


def test_what_opens_another_account_stays_here_where_the_key_is_replaced() -> None:
    secrets = {"Cookie": "a=b", "x-goog-api-key": "k", "Api-Key": "k", "Ocp-Apim-Subscription-Key": "k"}

    async def test(front: Front) -> None:
        await front.ask({**secrets, "Idempotency-Key": "mine"}, max_tokens=2)
        ((_, head, _, _),) = front.upstream.seen
        assert not {name.lower() for name in secrets} & {name.lower() for name in head}
        assert head["Idempotency-Key"] == "mine"

    before(test, settings=Settings(key=SECRET))


@queued()
async def test_a_client_that_waits_learns_its_place(front: Front) -> None:
    await front.ask(max_tokens=9)  # so that the queue knows how long a token takes
    (first,) = await front.occupied(1, headers={"X-Request-Id": "first"})
    waiting = []
    for i in range(3):
        waiting.append(asyncio.create_task(front.ask({"X-Request-Id": f"w{i}"}, max_tokens=3)))
        await front.until(lambda i=i: len(front.queue.manager.queued) > i)
    places = [(await front.send("GET", f"/queue/position?id={id}")).json for id in ("first", "w0", "w2")]
    assert [(place["state"], place["before"]) for place in places] == [
        ("running", None),
        ("waiting", 0),
        ("waiting", 2),
    ]
    assert places[2]["expected_wait_s"] > 0
    assert (await front.send("GET", "/queue/position?id=nobody")).status == 404
    front.go()
    await asyncio.gather(first, *waiting)


@pytest.mark.parametrize("streams", [True, False])
@queued(settings=Settings(client_tokens=30))
async def test_a_client_that_has_used_its_tokens_of_a_minute_is_refused_and_others_are_not(
    front: Front, streams: bool
) -> None:
    assert (await front.ask(user="alice", max_tokens=40, stream=streams)).status == 200
    refused = await front.ask(user="alice", max_tokens=4)
    assert refused.status == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert (await front.ask(user="bob", max_tokens=4)).status == 200


@queued()
async def test_the_counts_of_the_upstream_win(front: Front) -> None:
    await front.ask(max_tokens=6, stream_options={"include_usage": True})
    await front.ask(max_tokens=5, stream=False)
    await front.ask(max_tokens=3, real=12)
    await front.until(lambda: front.idle)
    assert (await front.send("GET", "/stats")).json["total-tokens-handled"] == 6 + 5 + 12


@queued()
async def test_the_pages_of_our_server_answer_on_the_queue(front: Front) -> None:
    for path in ("/", "/health", "/stats", "/metrics", "/policy", "/slots", "/race", "/load"):
        assert (await front.send("GET", path)).status == 200, path
    assert (await front.send("GET", "/events?detail=1", leaves_after=1)).status == 200
