"""What the streaming benchmark counts as an answer, and that a real server gives it whole ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from support import Server

from benchmarks.streaming import END, rounds, tokens_of

HEAD = b"HTTP/1.1 %s\r\nX: y\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n'


def test_only_a_whole_answer_has_tokens() -> None:
    good = HEAD % b"200 OK"
    assert tokens_of(good + b'{"usage":{"completion_tokens":7}}\n', stream=False) == 7
    stream = b'data: {"choices":[1],"usage":null}\n\n' + USAGE + END[True]
    assert tokens_of(good + stream, stream=True) == 7
    assert tokens_of(good + stream[:-1], stream=True) == 0
    assert tokens_of(HEAD % b"429 TOO MANY" + b'{"error":{}}\n', stream=False) == 0


@pytest.mark.full
@pytest.mark.process
def test_a_real_server_streams_all_tokens_to_many_at_once(tmp_path: Path) -> None:
    args = argparse.Namespace(requests=24, tokens=50, rounds=1)
    with Server(tmp_path / "log", "dynamic", "--model", "mock:llm-mock@100") as server:
        figures = rounds(server.port, args)
    assert figures["whole"] > 0
    assert figures["ratio"] == figures["streamed"] / figures["whole"]
    assert 1 <= figures["reads_per_stream"] <= 51
