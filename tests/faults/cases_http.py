"""C: what comes before any route: bytes that are no HTTP, hosts, keys, and looking in while all is busy."""

from __future__ import annotations

import json
import re

from harness import PATIENCE, Setting, Watched, check_error
from table import Case, all_of, body

from tests.support import wait_until
from tests.support.servers import Answer

HEAD = b"Host: localhost\r\nConnection: close\r\n"
SLOW = Setting(("--max-tokens-per-step", "64"), {"slow_step": {"ms": 100, "prompt_contains": "SLOWLY"}}, mock=True)
SLOWLY = body("/inference", "SLOWLY", 900)  # for longer than anything that happens meanwhile
PATHS = ("/nowhere", "//stats", "/%2e%2e/etc/passwd", "/web/../LICENSE", "/web/%2e%2e/LICENSE", "/web/..%2fLICENSE",
         "/stats%00", "/inference/")  # fmt: skip


def said_to(server: Watched, sent: bytes) -> bytes:
    """Return all that comes back until the server closes."""
    with server.connect() as sock:
        sock.sendall(sent)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def get(path: bytes = b"/health", headers: bytes = b"", version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET " + path + b" " + version + b"\r\n" + HEAD + headers + b"\r\n"


def protocol_is_kept(server: Watched) -> None:
    for sent, status in (
        (b"garbage\r\n\r\n", b" 400 "), (get(version=b"HTTP/9.9"), b" 400 "),
        (b"GET /health HTTP/1.0\r\n\r\n", b" 200 "), (get(b"http://x/health"), b" 200 "),
    ):  # fmt: skip
        assert status in said_to(server, sent)[:20], sent
    with server.connect() as sock:  # what TLS says first has no end of line: nothing to answer to
        sock.sendall(bytes.fromhex("16030100c8010000c40303") + b"\x55" * 64)
        sock.shutdown(1)
        assert b" 200 " not in sock.recv(20)


def who_asks_whether_to_go_on_is_told(server: Watched) -> None:
    sent = body("/inference")
    with server.connect() as sock:
        sock.sendall(b"POST /inference HTTP/1.1\r\n" + HEAD + b"Expect: 100-continue\r\n"
                     + b"Content-Length: %d\r\n\r\n" % len(sent))  # fmt: skip
        assert sock.recv(1024).startswith(b"HTTP/1.1 100 ")
        sock.sendall(sent)
        assert sock.recv(1024).startswith(b"HTTP/1.1 200 ")
    server.ledger.note("POST", "/inference", 200)


def no_path_leads_out(server: Watched) -> None:
    for path in PATHS:
        head, _, content = said_to(server, get(path.encode())).partition(b"\r\n\r\n")
        assert b" 404 " in head[:20], path
        check_error(path, Answer(404, {}, content))


def ten_in_a_row_are_answered_in_order(server: Watched) -> None:
    asked = [b"GET /requests/none-%d HTTP/1.1\r\nHost: localhost\r\n" % i for i in range(10)]
    said = said_to(server, b"\r\n".join([*asked, b"Connection: close\r\n\r\n"]))
    assert re.findall(rb"'none-(\d)'", said) == [b"%d" % i for i in range(10)]


def only_local_names_are_trusted_on_loopback(server: Watched) -> None:
    assert server.send("GET", "/stats", None, Host="evil.example").status == 400


def pages_of_other_sites_are_refused(server: Watched) -> None:
    for path in ("/inference", "/v1/completions", "/generate"):
        for kind in ("text/plain", "application/json"):
            answer = server.ask(path, body(path), Sec_Fetch_Site="cross-site", Content_Type=kind)
            assert answer.status == 403
            assert not any(name.lower().startswith("access-control") for name in answer.headers)


def a_forged_origin_is_not_believed(server: Watched) -> None:
    headers = {"X_Forwarded_For": "6.6.6.6", "Forwarded": "for=6.6.6.6", "X_Request_Id": "forged"}
    assert server.ask("/inference", body("/inference"), **headers).status == 200
    wait_until(lambda: '"forged"' in server.output())
    lines = [json.loads(line) for line in server.output().splitlines() if line.startswith("{")]
    assert {line["client"] for line in lines if line["id"] == "forged"} == {"127.0.0.1"}


def looking_in_waits_for_no_request(server: Watched) -> None:
    taken_in = server.taken_in()
    socks = [server.begin("/inference", SLOWLY) for _ in range(server.places)]
    wait_until(lambda: server.taken_in() >= taken_in + len(socks))
    for path in ("/metrics", "/stats", "/health", "/slots", "/") * 5:
        assert server.ask(path, method="GET").status == 200
    now = server.figures()
    assert now["requests-running"] + now["requests-waiting"] == len(socks)  # it was busy all the while
    for sock in socks:
        sock.close()
    server.ledger.leave(len(socks))
    wait_until(server.is_at_rest, PATIENCE)


CASES = [
    Case("C1", "bytes that are no HTTP, or old, or new", protocol_is_kept),
    Case("C2", "long headers, many headers, a long address",
         tests=("tests/launch/test_front_door.py::test_what_is_no_http_is_refused_in_json_too",)),
    Case("C3", "Expect: 100-continue", who_asks_whether_to_go_on_is_told),
    Case("C4", "paths that would lead out", no_path_leads_out),
    Case("C5", "ten requests at once on a connection", ten_in_a_row_are_answered_in_order),
    Case("C6", "a host that is not ours",
         tests=("tests/api/test_middleware.py::test_only_trusted_hosts_are_answered_where_they_are_named",)),
    Case("C7", "a page of another site", all_of(
        pages_of_other_sites_are_refused, only_local_names_are_trusted_on_loopback)),
    Case("C8", "no key, and wrong ones, on every route",
         tests=("tests/api/test_routes.py::test_every_route_but_health_asks_for_the_key",
                "tests/api/test_routes.py::test_a_wrong_key_is_refused")),
    Case("C9", "a forged X-Forwarded-For", a_forged_origin_is_not_believed),
    Case("C10", "looking in under full load", looking_in_waits_for_no_request, setting=SLOW),
]  # fmt: skip
