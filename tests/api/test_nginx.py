"""The samples for nginx: their limits, and real requests through them to one server and to two, one of which stops."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from app import create_app
from config import Config
from tests.support import ROOT, in_background, points, wait_until
from tests.support.faults import arming
from tests.support.servers import Server, free_port

DEPLOY = ROOT / "deploy"
SAMPLES = ["nginx.conf", "nginx-upstreams.conf"]
KIND = {"Content-Type": "application/json"}
LONG = 300  # tokens of a stream that outlasts many short requests
SLOW_STEPS = arming({"slow_step": {"ms": 20}})


def read(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


@pytest.mark.parametrize("name", SAMPLES)
def test_nginx_outlasts_the_longest_request_and_hides_what_is_not_for_strangers(name: str) -> None:
    text = re.sub(r"#.*", "", read(name))
    assert text.count("{") == text.count("}")
    settings = dict(re.findall(r"^\s*(\w+) ([^;{]+);", text, re.M))
    assert int(settings["proxy_read_timeout"].removesuffix("s")) >= Config().request_timeout
    assert settings["client_max_body_size"] == "1m"
    assert {settings[k] for k in ("client_header_timeout", "client_body_timeout")} == {"10s"}
    assert (settings["proxy_buffering"], settings["proxy_ignore_client_abort"]) == ("off", "off")
    assert settings["proxy_http_version"] == "1.1"
    hidden = re.search(r"location ~ \^/\(([^)]+)\)", text)
    assert hidden is not None
    routes = {rule.rule.split("/")[1] for rule in create_app(Config()).url_map.iter_rules()}
    assert set(hidden[1].split("|")) <= routes


def test_a_request_that_may_have_ended_in_a_timeout_is_not_repeated() -> None:
    settings = dict(re.findall(r"^\s*(\w+) (\d+)s?;", read("nginx-upstreams.conf"), re.M))
    assert int(settings["proxy_next_upstream_timeout"]) < int(settings["proxy_read_timeout"])


def test_both_lists_of_servers_are_the_same() -> None:
    blocks = re.findall(r"^upstream \w+ \{(.*?)^\}", read("nginx-upstreams.conf"), re.M | re.S)
    chat, page = (re.findall(r"^ +server (\S+?)[; ]", block, re.M) for block in blocks)
    assert len(chat) == 2
    assert chat == page


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], list[Server]]]:
    """Return what gives servers that run; it replaces those that a test has stopped."""
    folder = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def give(count: int) -> list[Server]:
        alive = [server for server in started if server.process.poll() is None][:count]
        for _ in range(count - len(alive)):
            log = folder / f"log{len(started)}"
            started.append(Server(log, "dynamic", "--model", "mock:llm-mock@50", **SLOW_STEPS).start())
            alive.append(started[-1])
        return [server.wait() for server in alive]

    yield give
    for server in started:
        server.stop()


@contextlib.contextmanager
def nginx(folder: Path, name: str, servers: dict[str, Server]) -> Iterator[int]:
    """Run nginx with a sample, but for names, ports and paths; return the port at which it lets strangers in."""
    if not (shutil.which("nginx") and shutil.which("openssl")):
        pytest.skip("nginx and openssl are not both here: install them (Debian: apt install nginx openssl)")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=llm.example.org",
         "-keyout", str(folder / "key"), "-out", str(folder / "pem")],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    port = free_port()
    text = read(name).replace("443 ssl", f"127.0.0.1:{port} ssl")
    for address, server in servers.items():
        assert address in text
        text = text.replace(address, f"127.0.0.1:{server.port}")
    for kind in ("pem", "key"):
        text = text.replace(f"/etc/ssl/llm.example.org.{kind}", str(folder / kind))
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{paths}{text}\n}}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    with (folder / "nginx.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        wait_until(lambda: answers(port))
        yield port
    finally:
        process.terminate()
        process.wait(60)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), through_tls(port):
        return True
    return False


@contextlib.contextmanager
def through_tls(port: int, source: str = "127.0.0.1") -> Iterator[http.client.HTTPSConnection]:
    """Return a connection to nginx, from an address that may be another than its own."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=anybody, source_address=(source, 0))
    connection.connect()
    with contextlib.closing(connection):
        yield connection


def begin_stream(connection: http.client.HTTPSConnection, tokens: int) -> http.client.HTTPResponse:
    """Ask for a stream and return it once its first event has come."""
    body = json.dumps({"prompt": "the", "max_tokens": tokens, "stream": True})
    connection.request("POST", "/v1/completions", body, KIND)
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    return reply


@pytest.mark.process
def test_strangers_come_through_nginx_and_are_noticed_when_they_go(
    running: Callable[[int], list[Server]], tmp_path: Path
) -> None:
    (server,) = running(1)
    with nginx(tmp_path, "nginx.conf", {"127.0.0.1:8500": server}) as port:
        with through_tls(port) as stranger:
            stranger.request("POST", "/inference", json.dumps({"prompt": "a", "num_tokens": 2}))
            reply = stranger.getresponse()
            assert reply.status == 200
            assert json.load(reply)["num_tokens"] == 2
            assert re.fullmatch("[0-9a-f]{32}", reply.headers["X-Request-Id"])  # nginx's own
            stranger.request("POST", "/inference", b"x" * (2 << 20))
            assert stranger.getresponse().status == 413
        before = server.get("/stats").json["http"]["cancelled"]
        with through_tls(port) as stranger:
            begin_stream(stranger, 200)  # while the rest is being computed:
            assert server.get("/stats").json["requests-running"] == 1
        wait_until(lambda: server.get("/stats").json["http"]["cancelled"] == before + 1)
        wait_until(lambda: server.get("/stats").json["requests-running"] == 0)
        for path, allowed in (("/stats", False), ("/metrics", False), ("/health", True)):
            with through_tls(port, "127.0.0.2") as stranger:
                stranger.request("GET", path)
                assert stranger.getresponse().status == (200 if allowed else 403), path


@pytest.fixture
def pair(running: Callable[[int], list[Server]], tmp_path: Path) -> Iterator[tuple[list[Server], int]]:
    """Return two servers and the port of nginx before them."""
    servers = running(2)
    addresses = {f"10.0.0.1{i + 1}:8500": server for i, server in enumerate(servers)}
    with nginx(tmp_path, "nginx-upstreams.conf", addresses) as port:
        yield servers, port


@contextlib.contextmanager
def clients(port: int, count: int) -> Iterator[list[int]]:
    """Let so many clients, each with its own address, send short requests until the end; give the statuses."""
    statuses: list[int] = []
    over = threading.Event()

    def send(source: str) -> None:
        with through_tls(port, source) as client:
            while not over.is_set():
                client.request("POST", "/inference", json.dumps({"prompt": "a", "num_tokens": 6}))
                reply = client.getresponse()
                reply.read()
                statuses.append(reply.status)

    with contextlib.ExitStack() as stack:
        for i in range(count):
            stack.enter_context(in_background(partial(send, f"127.0.1.{i + 1}")))
        stack.callback(over.set)
        yield statuses


def end(server: Server, number: int) -> None:
    """Send a signal to a server; SIGKILL to its worker as well, whose requests then end at once."""
    master = server.process.pid
    workers = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    for pid in [master, *(map(int, workers) if number == signal.SIGKILL else ())]:
        os.kill(pid, number)


@pytest.mark.process
@pytest.mark.parametrize("number", points(1, signal.SIGTERM, signal.SIGKILL))
def test_no_request_that_had_not_begun_fails_when_one_of_two_servers_stops(
    pair: tuple[list[Server], int], number: int
) -> None:
    servers, port = pair
    with through_tls(port) as viewer, through_tls(port) as reader:
        viewer.request("GET", "/events")
        steps = viewer.getresponse()
        reply = begin_stream(reader, LONG)
        assert 0 < max(map(longest_answer, servers)) < LONG  # so nginx has not waited for the rest
        with clients(port, 4) as statuses:
            wait_until(lambda: len(statuses) > 20)
            assert [steps.readline()[:4] for _ in range(3)] == [b"retr", b"\n", b"id: "]
            answered = [server.get("/stats").json["requests"] for server in servers]
            assert all(answered), answered
            stopped = max(servers, key=longest_answer)
            with in_background(lambda: rest(reply)) as text:
                end(stopped, number)
                enough = len(statuses) + 60
                wait_until(lambda: len(statuses) > enough)
    assert set(statuses) == {200}
    assert stopped.stop() == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    is_whole = text[0].endswith(b"data: [DONE]\n\n")
    assert is_whole == (number == signal.SIGTERM)


def rest(reply: http.client.HTTPResponse) -> bytes:
    """Return what comes until a response ends or breaks off."""
    try:
        return reply.read()
    except http.client.IncompleteRead as broken:
        return broken.partial


def longest_answer(server: Server) -> int:
    """Return how many tokens the longest answer of a server has by now."""
    return max(
        (slot["next_token"]["n_decoded"] for slot in server.get("/slots").json if slot["is_processing"]), default=0
    )
