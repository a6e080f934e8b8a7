"""A file of requests that share prefixes: kill -9 of the server and of the runner loses no line and answers none twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import ROOT, wait_until
from tests.support.scheduling import drawn
from tests.support.servers import Server, clean_environment, kill

pytestmark = [pytest.mark.process, pytest.mark.full]


def test_a_batch_goes_on_after_the_server_and_then_the_runner_too_are_killed(tmp_path: Path) -> None:
    sequences = drawn(300, prefixes=10, tokens=192)
    bodies = {seq.id: {"prompt": seq.prompt_ids, "max_tokens": seq.max_tokens, "ignore_eos": True} for seq in sequences}
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ({"custom_id": id, "url": "/v1/completions", "body": body} for id, body in bodies.items())
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    # 104,857,600 bytes hold 66 pages of this model, and the prefixes need 120.
    flags = ["--model", "mock:llm-mock@50", "--max-batch-size", "4", "--kv-memory", "100M"]
    server = Server(tmp_path / "log", "dynamic+prefix-tree", *flags)

    def run() -> subprocess.Popen[bytes]:
        words = [str(source), str(answers), f"http://127.0.0.1:{server.port}", "--concurrency", "300"]
        return subprocess.Popen([sys.executable, "-m", "client.batch", *words], cwd=ROOT, env=clean_environment())

    def answered() -> int:
        return answers.read_bytes().count(b"\n") if answers.exists() else 0

    server.start().wait()
    runner = run()
    try:
        wait_until(lambda: answered() > 75)
        kill(server.process)
        kept = answered()
        assert kept < len(bodies)
        server.start().wait()
        wait_until(lambda: answered() > max(150, kept), 60)  # the same runner goes on
        kill(server.process)
        kill(runner)
        assert answered() < len(bodies)
        server.start().wait()
        runner = run()
        assert runner.wait(60) == 0
    finally:
        kill(runner)
        kill(server.process)
    rows = [json.loads(row) for row in answers.read_text().splitlines()]
    assert Counter(row["custom_id"] for row in rows) == dict.fromkeys(bodies, 1)
    for row in rows:
        assert row["response"]["body"]["usage"]["completion_tokens"] == bodies[row["custom_id"]]["max_tokens"]
