"""The command line of a queue: what is refused with which remedy, and which slots and policies it finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from integrations.queue import options
from integrations.queue.sites import Site
from terminal.options import UsageError
from tests.support import ROOT, wait_until
from tests.support.servers import free_port

URL = ["--upstream", "http://127.0.0.1:9"]


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_INTERNAL_COMPLETE", "1")
    monkeypatch.setattr(options, "ASK_SECONDS", 60.0)  # a busy machine may take long, and nothing here is silent


def report_slots(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    async def tell(site: Site, key: str) -> int:
        return slots

    monkeypatch.setattr(options, "_ask_slots", tell)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ([], "--upstream URL"),
        (["--upstream", "ftp://x"], "http://127.0.0.1:11434"),
        (["--upstream", "http://key:secret@x"], "http://127.0.0.1:11434"),
        (["--upstream", "http://x?a=1"], "http://127.0.0.1:11434"),
        (["--upstream", "http://x#0"], "1 to 4096"),
        (["--upstream", "http://x:port"], "http://127.0.0.1:11434"),
        (["--upstream", "http://x:1/v1/"], "Use http://x:1$"),
        ([*URL, *URL], "named twice. Use it once"),
        (["--upstream", "http://localhost:8600#2"], "is this queue itself"),
        (
            ["--upstream", "http://10.0.0.5:81#2", "--host", "10.0.0.5", "--port", "81", "--api-key", "k"],
            "this queue itself",
        ),
        ([*URL, "--slots", "2", "--host", "0.0.0.0"], "EB_API_KEY"),
        ([*URL, "--slots", "2", "--upstream-key-env", "EB_TEST_NOTHING"], "Set it"),
        ([*URL, "--slots", "2", "--max-batch-size", "8"], "--max-batch-size has no effect"),
        ([*URL, "--slots", "2", "--doctor"], "--doctor has no effect"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_remedy(words: list[str], remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        options.parse(words)


def test_it_listens_on_this_machine_alone_under_dynamic() -> None:
    plan = options.parse([*URL, "--slots", "3"])
    assert (plan.config.host, plan.config.port, plan.config.policy, plan.config.max_batch_size) == (
        "127.0.0.1",
        8600,
        "dynamic",
        3,
    )


def test_another_address_needs_a_key() -> None:
    assert options.parse([*URL, "--slots", "3", "--host", "0.0.0.0", "--api-key", "k"]).config.host == "0.0.0.0"


def test_an_upstream_that_tells_its_slots_gets_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    report_slots(monkeypatch, 4)
    plan = options.parse(URL)
    assert (plan.sites.slots, plan.config.policy, plan.notes) == (5, "dynamic", ())


@pytest.mark.parametrize(
    ("path", "answer", "slots"),
    [
        ("/props", {"total_slots": 4}, 5),
        ("/stats", {"policy": "dynamic", "engine": {"max_batch_size": 8}}, 9),
        ("/server_info", {"max_running_requests": 48, "max_total_num_tokens": 9}, 49),
        ("/props", {"total_slots": "many"}, options.UNKNOWN_SLOTS),
    ],
)
def test_an_upstream_is_asked_for_its_slots_in_the_way_of_its_kind(path: str, answer: Any, slots: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == path else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        plan = options.parse(["--upstream", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert plan.sites.slots == slots


@pytest.mark.parametrize(("words", "policy"), [([], "adaptive"), (["dynamic+sjf"], "dynamic+sjf")])
def test_slots_that_nobody_tells_are_found_by_adaptive(
    monkeypatch: pytest.MonkeyPatch, words: list[str], policy: str
) -> None:
    report_slots(monkeypatch, 0)
    plan = options.parse([*words, *URL])
    assert (plan.config.policy, len(plan.notes)) == (policy, 1)


def test_upstreams_have_slots_of_their_own_and_names_that_differ() -> None:
    sites: Any = options.parse(["--upstream", "http://x:1/a#2", "--upstream=http://x:1/b", "--slots", "7"]).sites.all
    assert [(site.name, site.url, site.slots) for site in sites] == [
        ("x:1", "http://x:1/a", 2),
        ("x:1-1", "http://x:1/b", 7),
    ]


def test_a_variable_that_is_no_setting_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_MAX_QEUE", "5")
    plan = options.parse([*URL, "--slots", "3"])
    assert (plan.config.policy, len(plan.notes)) == ("dynamic", 1)
    assert "EB_MAX_QEUE is not a setting" in plan.notes[0]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def test_an_upstream_that_is_down_is_told_from_one_without_slots() -> None:
    assert "127.0.0.1:9 does not answer" in options.parse(URL).notes[0]


def test_the_command_serves_until_it_is_told_to_end_though_a_page_is_open() -> None:
    port = free_port()
    command = [sys.executable, "-m", "integrations.queue", "dynamic+vtc", *URL, "--slots", "2", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health/live") or process.poll() is not None)
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=60)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        page.close()
        assert process.stderr is not None
        assert "(2 at once) under dynamic+vtc" in process.stderr.read()
