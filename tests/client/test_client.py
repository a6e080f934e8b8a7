"""The client against a small server of known delay: what it sends, measures, prints and returns."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from client import client, flags
from tests.support import ROOT
from tests.support.mock_server import STATS, MockServer
from tests.support.servers import free_port


def run(server: MockServer, *flags: str, **environ: str) -> int:
    return client.main([*flags, "--port", str(server.port)], {"IP": "127.0.0.1", **environ})


def last_json(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Give the last line of stdout, parsed, and all of stderr."""
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def test_in_a_pipe_a_run_ends_with_tables_and_one_line_of_json(
    server: MockServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    assert run(server, "--burst", "--numsamples", "12", "--seed", "5", "--json", str(file)) == 0
    result, err = last_json(capsys)
    assert (result["completed"], result["failed"], result["unsent"]) == (12, 0, 0)
    assert result["total_output_tokens"] == sum(body["num_tokens"] for body in server.asked)
    assert (result["policy"], result["model_id"], result["seed"]) == ("dynamic", "bard", 5)
    assert result["request_rate"] == "inf"
    assert 0 < result["p99_ttft_ms"] < result["p99_e2el_ms"]
    assert result["server_before"] == result["server_after"] == STATS
    assert json.loads(file.read_text()) == result
    for shown in ("Successful requests", "Output tokens/s", "E2E", "seed 5"):
        assert shown in err
    assert err.index("TTFT") < err.index("ITL") < err.index("E2E") < err.index("Successful requests")
    assert "The original's figures" not in err
    assert err.rstrip().endswith(str(file))
    assert "{" not in err
    assert "and so on" not in err


def on_a_terminal(server: MockServer, folder: Path, *flags: str) -> list[str]:
    """Return the lines that the client writes to a terminal of 80 columns."""
    near, far = os.openpty()
    environ = {**os.environ, "IP": "127.0.0.1", "TERM": "xterm", "COLUMNS": "80"}
    with open(far, "wb") as screen:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "client" / "client.py"), *flags, "--port", str(server.port)],
            cwd=folder, env=environ, stdout=screen, stderr=screen,
        )  # fmt: skip
    written = b""
    with open(near, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # it has ended
        while piece := screen.read(4096):
            written += piece
    assert process.wait(60) == 0, written.decode()
    return written.decode().splitlines()


def test_on_a_terminal_a_run_ends_with_its_table_and_the_path_of_its_result(server: MockServer, tmp_path: Path) -> None:
    engine = {"model": "bard", "batch_stats": [{"batch_size": n, "count": 1} for n in range(64)]}
    server.stats = (200, {**STATS, "throughput": 123.4, "engine": engine})
    lines = on_a_terminal(server, tmp_path, "--burst", "--numsamples", "3", "--seed", "5", "--original")
    assert not any("{" in line for line in lines)
    assert len(lines) < 50
    assert all(len(line) <= 80 for line in lines if "\x1b" not in line)
    assert any(line.split()[1:4:2] == ["throughput", "123.40"] and "sum of latencies" in line for line in lines)
    assert "└" in lines[-2]
    result = json.loads((tmp_path / lines[-1].rpartition(" ")[2]).read_text())
    assert (result["completed"], result["seed"]) == (3, 5)
    assert result["server_after"]["engine"] == engine


@pytest.mark.full
def test_on_a_terminal_json_is_printed_on_request(server: MockServer, tmp_path: Path) -> None:
    lines = on_a_terminal(server, tmp_path, "--burst", "--numsamples", "2", "--json", "-")
    assert json.loads(lines[-1])["completed"] == 2
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_a_prompt_gives_its_completion_alone(server: MockServer, tmp_path: Path) -> None:
    lines = on_a_terminal(server, tmp_path, "--prompt", "ROMEO:", "--numtokens", "4", "--no-stream")
    assert lines[0] == "ROMEO: [bold]and so on"
    assert not any("{" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_verbose_prints_the_completions_as_they_are(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--burst", "--numsamples", "2", "--verbose", "--no-stream") == 0
    assert last_json(capsys)[1].count("[bold]and so on") == 2


def test_the_same_seed_sends_the_same_bodies(server: MockServer) -> None:
    for _ in range(2):
        assert run(server, "--wait", "0", "--numsamples", "6", "--seed", "9") == 0
    bodies = [json.dumps(body) for body in server.asked]
    assert sorted(bodies[:6]) == sorted(bodies[6:])


def test_without_flags_it_is_a_hundred_requests_at_one_a_second() -> None:
    settings = client.read_settings([], {"IP": "x"})
    assert settings.numsamples == 100
    assert settings.arrivals == client.data.Arrivals("poisson", 1.0)
    assert settings.selection == "normal"


def test_numtokens_range_implies_the_selection_range(server: MockServer) -> None:
    assert run(server, "--burst", "--numsamples", "9", "--numtokens_range", "3", "7") == 0
    assert {body["num_tokens"] for body in server.asked} <= {3, 7}
    assert all(len(body["prompt"].split()) == body["num_tokens"] for body in server.asked)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((429, {"error": {"message": "queue full", "type": "overloaded"}}), "HTTP 429 (overloaded)"),
        ((500, b"<html>"), "HTTP 500"),
        ((200, b"no json"), "unreadable answer"),
        ((200, b"[" * 100_000), "unreadable answer"),
        ((200, {"completion": None}), "unreadable answer"),
        ((200, [1]), "unreadable answer"),
        ((302, {"error": "elsewhere"}), "HTTP 302"),
        ((0, None), "connection broken"),
    ],
)
def test_failures_are_counted_by_kind_and_exit_with_1(
    server: MockServer, capsys: pytest.CaptureFixture[str], answer: tuple[int, Any], kind: str
) -> None:
    server.answer = lambda body: answer if len(server.asked) > 1 else None
    server.ttft = 0.01
    assert run(server, "--rate", "50", "--numsamples", "4", "--seed", "1") == 1
    result, err = last_json(capsys)
    assert result["failed"] >= 3
    assert result["failures"] == {kind: result["failed"]}
    assert f"{'refused' if '429' in kind else 'failed'}: {kind}" in err
    assert "Traceback" not in err


def test_silence_beyond_the_timeout_counts_as_failed(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.ttft = 60
    assert run(server, "--burst", "--numsamples", "2", "--timeout", "0.2") == 1
    assert last_json(capsys)[0]["failures"] == {"timeout": 2}


def test_a_server_that_dies_in_the_middle_leaves_a_result(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer_once_then_die(body: dict[str, Any]) -> tuple[int, Any] | None:
        server.stats = (0, None)
        return None if len(server.asked) == 1 else (0, None)

    server.answer = answer_once_then_die
    assert run(server, "--wait", "0.1", "--numsamples", "5") == 1
    result, err = last_json(capsys)
    assert result["completed"] + result["failed"] == 5
    assert result["server_after"] is None
    assert "/stats" in err


@pytest.mark.parametrize("flags", [[], ["--prompt", "hi", "--numtokens", "3"]])
def test_an_unreachable_server_ends_with_3_url_and_remedy(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert client.main([*flags, "--port", str(port)], {"IP": "127.0.0.1"}) == 3
    err = capsys.readouterr().err
    assert f"error: cannot reach http://127.0.0.1:{port}. Is the server running?" in err
    assert "./server.sh dynamic" in err


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_server_on_this_machine_is_reached_past_the_proxy_of_the_environment(
    name: str, server: MockServer, proxied: pytest.MonkeyPatch
) -> None:
    proxied.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert run(server, "--burst", "--numsamples", "2") == 0


def test_the_error_names_the_proxy_without_its_password(
    capsys: pytest.CaptureFixture[str], proxied: pytest.MonkeyPatch
) -> None:
    proxied.setenv("http_proxy", f"http://me:secret@127.0.0.1:{free_port()}")
    assert client.main(["--burst", "http://192.0.2.1:8500"], {}) == 3
    err = capsys.readouterr().err
    assert "NO_PROXY=192.0.2.1" in err
    assert "secret" not in err


def test_a_server_without_stats_is_still_loaded(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stats = (500, b"the original before its first request")
    assert run(server, "--burst", "--numsamples", "2") == 0
    assert last_json(capsys)[0]["server_before"] is None


def test_a_prompt_is_sent_alone_and_its_completion_printed(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, more in ((" x x x x", []), ("ROMEO: [bold]and so on", ["--no-stream"])):
        assert run(server, "--prompt", "ROMEO:", "--numtokens", "4", "--seed", "2", *more) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0] == json.loads(out[-1])["completion"] == text
    whole = {"prompt": "ROMEO:", "num_tokens": 4, "seed": 2}
    assert server.asked == [whole | {"stream": True}, whole]


def test_a_rejected_prompt_shows_the_servers_message_and_exits_with_1(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda body: (400, {"error": {"message": "too long. Shorten it"}})
    assert run(server, "--prompt", "a", "--numtokens", "4") == 1
    assert "error: HTTP 400: too long. Shorten it" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--api-key", "k"], []])
def test_the_key_travels_as_bearer_and_not_into_the_result(
    server: MockServer, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run(server, "--burst", "--numsamples", "1", *flags, EB_API_KEY="k") == 0
    assert server.keys == ["Bearer k"]
    assert '"k"' not in capsys.readouterr().out


def test_a_missing_key_is_a_usage_error_with_remedy(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.stats = (401, {"error": {}})
    assert run(server) == 2
    assert "Set EB_API_KEY or use --api-key" in capsys.readouterr().err


NO_IP = ["ftp://10.0.0.5", "a b", "[zz]", "zz::"]


@pytest.mark.parametrize(
    ("flags", "words", "ip"),
    [
        (flags, words, "127.0.0.1")
        for flags, words in (
            ("--burst --rate 2", "--burst and --rate exclude each other"),
            ("--wait 1 --rate 2", "--rate and --wait exclude"),
            ("--num-samples=5", "Did you mean '--numsamples'?"),
            ("--rate 0", "--rate is '0'. Use a number above 0"),
            ("--numsamples 0", "Use a whole number from 1 to"),
            ("--numtokens_range 10 0", "--numtokens_range is '0'"),
            ("--numtokens_range 5 --selection normal", "draws its own lengths."),
            ("--prompt hi", "Use --prompt TEXT --numtokens 40"),
            ("--prompt= --numtokens 3", "--prompt is empty"),
            ("--numtokens 7", "--numtokens_range for a load run"),
            ("--prompt hi --numtokens 3 --burst", "Remove --burst"),
            ("--json /nowhere/at/all.json", "Use another --json file"),
            ("http://[zz]:80", "'http://[zz]:80' is not a server address"),
            ("http://[::1", "is not a server address"),
            ("http://h:99999", "is not a server address"),
            ("http://:80", "is not a server address"),
            ("host:99999", "is not a server address"),
            ("--url http://h", "Use the address alone, as in ./eb load http://localhost:8500"),
            ("--ip 10.0.0.5", "Use the address alone"),
        )
    ]
    + [("", f"IP: {host!r} is not a server address", host) for host in NO_IP],
)
def test_usage_errors_end_with_2_value_and_remedy(
    flags: str, words: str, ip: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.main(flags.split(), {"IP": ip}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err.replace("\n", " ")


def test_ip_comes_from_the_environment_then_from_the_env_file_then_from_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flags, "ENV_FILE", tmp_path / ".env")

    def url(*words: str, **environ: str) -> str:
        return client.read_settings(words, environ).target.url

    assert url() == "http://localhost:8500"
    (tmp_path / ".env").write_text("IP=10.0.0.5\n")
    assert url() == "http://10.0.0.5:8500"
    assert url(IP="::1") == url(IP="[::1]") == "http://[::1]:8500"
    assert url("--port", "9000") == "http://10.0.0.5:9000"
    assert url("host:7", IP="10.0.0.6") == "http://host:7"
    assert url("https://host/base/v1") == "https://host/base"
    assert capsys.readouterr().err == ""
