"""C: what comes before any route: bytes that are no HTTP, hosts, keys, and looking in while all is busy."""

from __future__ import annotations

import re

from harness import PATIENCE, Setting, Watched
from table import Case, body

from tests.support import wait_until

HEAD = b"Host: localhost\r\nConnection: close\r\n"
SLOW = Setting(("--max-tokens-per-step", "64"), {"slow_step": {"ms": 100, "prompt_contains": "SLOWLY"}}, mock=True)
SLOWLY = body("/inference", "SLOWLY", 900)  # for longer than anything that happens meanwhile


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


def ten_in_a_row_are_answered_in_order(server: Watched) -> None:
    asked = [b"GET /requests/none-%d HTTP/1.1\r\nHost: localhost\r\n" % i for i in range(10)]
    said = said_to(server, b"\r\n".join([*asked, b"Connection: close\r\n\r\n"]))
    assert re.findall(rb"'none-(\d)'", said) == [b"%d" % i for i in range(10)]


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
    Case("C4", "paths that would lead out",
         tests=("tests/api/test_routes.py::test_an_unknown_path_is_404_and_lists_the_known",)),
    Case("C5", "ten requests at once on a connection", ten_in_a_row_are_answered_in_order),
    Case("C6", "a host that is not ours",
         tests=("tests/api/test_middleware.py::test_only_trusted_hosts_are_answered_where_they_are_named",)),
    Case("C7", "a page of another site",
         tests=("tests/api/test_middleware.py::test_what_changes_something_is_refused_from_pages_of_other_sites",
                "tests/api/test_middleware.py::test_only_local_names_are_answered_on_loopback_where_none_is_named")),
    Case("C8", "no key, and wrong ones, on every route",
         tests=("tests/api/test_routes.py::test_every_route_but_health_asks_for_the_key",
                "tests/api/test_routes.py::test_a_wrong_key_is_refused")),
    Case("C9", "a forged X-Forwarded-For",
         tests=("tests/api/test_middleware.py::test_who_asks_is_the_peer_and_not_what_a_header_says",)),
    Case("C10", "looking in under full load", looking_in_waits_for_no_request, setting=SLOW),
]  # fmt: skip
