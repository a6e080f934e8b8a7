"""`client.batch`: each line of a file is answered once, whatever happens between."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from batch_files.lines import BadLine, ForeignFile, Line, Pending
from batch_files.output import InUse, LineFile
from client import batch
from tests.support import ROOT, limited, wait_until
from tests.support.mock_server import MockServer
from tests.support.servers import clean_environment

PATH = "/v1/completions"


def line(custom_id: str, **body: Any) -> str:
    fields = {"prompt": custom_id, "max_tokens": 2, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": PATH, "body": fields})


def write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{one}\n" for one in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []


def ids(path: Path) -> list[str]:
    return sorted(str(row["custom_id"]) for row in rows(path))


def run(server: MockServer, folder: Path, *options: str) -> int:
    words = [str(folder / "in.jsonl"), str(folder / "out.jsonl"), server.url, *options]
    return batch.main(words)


def test_each_line_is_answered_once_and_no_more_than_allowed_are_open(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", (line(f"r{i}") for i in range(50)))
    server.most = 8
    assert run(server, tmp_path, "--concurrency", "8") == 0
    assert ids(tmp_path / "out.jsonl") == sorted(f"r{i}" for i in range(50))
    assert server.most_running == 8
    first = rows(tmp_path / "out.jsonl")[0]
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["usage"]["completion_tokens"] == 2
    assert first["error"] is None
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_a_second_run_sends_only_what_has_no_answer(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", (line(f"r{i}") for i in range(20)))
    assert run(server, tmp_path) == 0
    kept = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(kept[:12]) + kept[12][:30])  # killed within a line
    server.asked.clear()
    assert run(server, tmp_path) == 0
    assert len(server.asked) == 8
    assert ids(tmp_path / "out.jsonl") == sorted(f"r{i}" for i in range(20))


def test_bad_lines_are_named_by_their_number_and_the_rest_is_answered(server: MockServer, tmp_path: Path) -> None:
    bad = ["{", "[1]", json.dumps({"custom_id": "", "url": PATH, "body": {}}),
           json.dumps({"custom_id": "u", "url": "http://x", "body": {}}), json.dumps({"custom_id": "b", "url": PATH}),
           json.dumps({"custom_id": "m", "method": "GET", "url": PATH, "body": {}}), line("s", stream=True)]  # fmt: skip
    write(tmp_path / "in.jsonl", [line("a"), *bad, "", line("a"), line("z")])
    assert run(server, tmp_path) == 1
    assert ids(tmp_path / "out.jsonl") == ["a", "z"]
    errors = rows(tmp_path / "out.errors.jsonl")
    assert {row["error"]["line"]: row["error"]["code"] for row in errors} == {
        2: "invalid_json_line", 3: "invalid_json_line", 4: "invalid_custom_id", 5: "invalid_url", 6: "missing_body",
        7: "invalid_method", 8: "invalid_body", 10: "duplicate_custom_id",
    }  # fmt: skip
    server.asked.clear()
    assert run(server, tmp_path) == 1  # again: nothing is sent, and no error is repeated
    assert server.asked == []
    assert rows(tmp_path / "out.errors.jsonl") == errors


def test_half_a_surrogate_pair_in_an_id_is_written_as_its_escape(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a\ud83d", prompt="x")])
    for _ in range(2):  # the second run finds the answer
        assert run(server, tmp_path) == 0
        assert (tmp_path / "out.jsonl").read_bytes().decode("utf-8")
        assert ids(tmp_path / "out.jsonl") == ["a\ud83d"]


def test_an_error_of_the_server_is_an_answer_too(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("good"), line("bad")])
    server.answer = lambda body: (400, {"error": {"message": "no"}}) if body["prompt"] == "bad" else None
    assert run(server, tmp_path) == 1
    assert ids(tmp_path / "out.jsonl") == ["good"]
    (error,) = rows(tmp_path / "out.errors.jsonl")
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)


@pytest.mark.parametrize("status", [429, 503, 0])
def test_a_line_that_a_full_or_dying_server_refuses_is_sent_again(
    server: MockServer, tmp_path: Path, status: int
) -> None:
    write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(4)])
    refused: list[str] = []

    def refuse_once(body: dict[str, Any]) -> tuple[int, Any] | None:
        if body["prompt"] in refused:
            return None
        refused.append(body["prompt"])
        return status, {"error": {"type": "overloaded"}}

    server.answer = refuse_once
    assert run(server, tmp_path) == 0
    assert ids(tmp_path / "out.jsonl") == ["r0", "r1", "r2", "r3"]
    assert len(server.asked) == 8


def test_what_fits_into_no_memory_is_not_sent_again(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("large")])
    server.answer = lambda body: (503, {"error": {"type": "out_of_memory"}})
    assert run(server, tmp_path) == 1
    assert len(server.asked) == 1


def test_without_progress_it_ends_and_can_go_on_later(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    server.answer = lambda body: (503, {})
    assert run(server, tmp_path, "--patience", "0") == 3
    server.answer = lambda body: None
    assert run(server, tmp_path) == 0
    assert ids(tmp_path / "out.jsonl") == ["a"]


def test_a_key_that_is_refused_ends_the_run_without_an_answer(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    server.answer = lambda body: (401, {})
    assert run(server, tmp_path) == 2
    assert rows(tmp_path / "out.jsonl") == rows(tmp_path / "out.errors.jsonl") == []


@pytest.mark.parametrize(
    ("given", "output"),
    [("missing.jsonl", "out.jsonl"), ("in.jsonl", "in.jsonl"), ("in.jsonl", "no/folder.jsonl"), ("in.jsonl", "notes")],
)
def test_files_that_cannot_be_used_are_refused(server: MockServer, tmp_path: Path, given: str, output: str) -> None:
    write(tmp_path / "in.jsonl", [line("a")])
    (tmp_path / "notes").write_text("a shopping list\n")
    assert batch.main([str(tmp_path / given), str(tmp_path / output), server.url]) == 2
    assert server.asked == []
    assert (tmp_path / "notes").read_text() == "a shopping list\n"


def test_one_process_at_a_time_writes_a_file(tmp_path: Path) -> None:
    with LineFile(tmp_path / "out.jsonl"), pytest.raises(InUse):
        LineFile(tmp_path / "out.jsonl")


def test_a_killed_run_goes_on_with_every_line_answered_once(server: MockServer, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", (line(f"r{i}") for i in range(300)))
    server.ttft = 0.05
    words = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), server.url, "--concurrency", "4"]
    process = subprocess.Popen([sys.executable, "-m", "client.batch", *words], cwd=ROOT, env=clean_environment())
    wait_until(lambda: len(server.asked) > 40)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.ttft = 0
    assert 0 < len(rows(tmp_path / "out.jsonl")) < 300
    assert batch.main(words) == 0
    assert ids(tmp_path / "out.jsonl") == sorted(f"r{i}" for i in range(300))


def test_a_full_disk_keeps_whole_lines_and_the_rest_can_be_sent_later(
    server: MockServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", (line(f"r{i}") for i in range(60)))
    with limited(resource.RLIMIT_FSIZE, 4096):  # so that writing fails as it does on a full disk
        assert run(server, tmp_path) == 1
    assert "Run the same command again" in capsys.readouterr().err
    assert 0 < len(rows(tmp_path / "out.jsonl")) < 60
    assert run(server, tmp_path) == 0
    assert ids(tmp_path / "out.jsonl") == sorted(f"r{i}" for i in range(60))


def test_many_long_ids_that_appear_twice_take_little_memory() -> None:
    ids = [f"{i:04}" + "\U0001f600" * 508 for i in range(1000)]
    lines = io.BytesIO("\n".join(map(line, ids * 2)).encode())
    tracemalloc.start()
    try:
        kinds = [type(one) for one in Pending(lines, [])]
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (kinds.count(Line), kinds.count(BadLine)) == (1000, 1000)
    assert held < 1 << 20  # the ids alone have two


@pytest.mark.parametrize("start", ["\ufeff", "\ufeff\n", "\ufeff \r\n\n"])
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_a_line(
    server: MockServer, tmp_path: Path, start: str
) -> None:
    write(tmp_path / "in.jsonl", [start + line("a"), line("b")])
    assert run(server, tmp_path) == 0
    assert ids(tmp_path / "out.jsonl") == ["a", "b"]


def test_a_file_of_something_else_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    with (tmp_path / "other.jsonl").open("rb") as other, pytest.raises(ForeignFile) as caught:
        Pending(io.BytesIO(b""), [other])
    assert caught.value.args[1] == 1


@pytest.mark.full
def test_a_file_of_a_gigabyte_takes_little_memory(tmp_path: Path) -> None:
    body = "x" * 20_000
    with (tmp_path / "large.jsonl").open("w") as file:
        for i in range(60_000):
            file.write(line(f"r{i}", prompt=body) + "\n")
        file.write('{"custom_id": "' + "y" * (64 << 20))  # one line that never ends
    assert os.path.getsize(tmp_path / "large.jsonl") > 1 << 30
    code = (
        "import sys, resource; from batch_files.lines import *; file = open(sys.argv[1], 'rb');"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; pending = Pending(file, []);"
        "kinds = [type(one).__name__ for one in pending];"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before;"
        "print(pending.total, kinds.count('Line'), kinds.count('BadLine'), grown)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "large.jsonl")], cwd=ROOT, env=clean_environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (tmp_path / "large.jsonl").unlink()
    total, good, bad, grown = map(int, done.stdout.split())
    assert (total, good, bad) == (60_001, 60_000, 1)
    assert grown < 200 << 10  # KiB


def test_a_line_knows_its_place() -> None:
    (only,) = Pending(io.BytesIO(b"\n\n" + line("a").encode()), [])
    assert only == Line(3, "a", PATH, {"prompt": "a", "max_tokens": 2})
