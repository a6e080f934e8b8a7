"""The client and the simulator draw the same requests: arrival, prompt, output, request by request."""

from __future__ import annotations

import csv
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from client.client import read_settings
from client.data import Planned, trace_sha256
from client.workloads import catalog, corpus
from models.sources.catalog import BARD
from models.text import ranks
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import from_folder
from simulate.__main__ import main
from tests.support import points
from tests.support.data import path_of

NUM = 40
TRACE = (
    '{"at": 0.5, "prompt_tokens": 30, "num_tokens": 9}\n{"at": 2, "prompt": "we come to the king", "num_tokens": 4}\n'
)
BLOCKS = '{"timestamp": 3, "input_length": 600, "output_length": 5, "hash_ids": [4, 5]}\n' * 2


@cache
def tokenizers() -> list[Any]:
    """Return bard's tokenizer, and what of GPT-2's splits words of the plays: its ids are others, but equally many."""
    return [Tokenizer(from_folder(BARD)), ranks.from_file(path_of("gpt2_words.tiktoken"))]


def sent(*flags: str) -> list[Planned]:
    """Return what `client/client.py` would send."""
    settings = read_settings([*flags, "--seed", "5"], {"IP": "127.0.0.1"})
    return settings.plan().planned


def simulated(folder: Path, *flags: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Return the requests of `./eb simulate run`, and its result."""
    assert main(["run", "nobatch", *flags, "--seed", "5", "--out", str(folder), "--no-plots", "--no-records"]) == 0
    with (folder / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    (result,) = (folder / "runs").glob("*.json")
    return rows, json.loads(result.read_text())


LENGTHS_KNOWN = [name for name in catalog.WORKLOADS if name not in (*catalog.OWN_LENGTHS, "agent")]


@pytest.mark.parametrize("spec", points(5, "fixed:30:7", "shared-prefix:2:40", "anyscale:100", *LENGTHS_KNOWN))
def test_every_workload_is_the_same_in_both_worlds(spec: str, tmp_path: Path) -> None:
    planned = sent("--workload", spec, "--numsamples", str(NUM), "--rate", "3")
    rows, result = simulated(tmp_path / "out", "--workload", spec, "--num", str(NUM), "--rate", "3")
    assert len(rows) == len(planned) == NUM
    for row, request in zip(rows, planned):
        assert float(row["arrival_s"]) == pytest.approx(request.at, abs=1e-6)
        assert int(row["asked_tokens"]) == request.num_tokens
        assert row["client"] == request.user
        for tokenizer in tokenizers():
            assert int(row["prompt_tokens"]) == len(tokenizer.encode_ordinary(request.prompt))
    assert result["trace_sha256"] == trace_sha256(planned)


@pytest.mark.parametrize(
    ("load", "arrivals"),
    [("gamma:2:0.25", "gamma"), ("constant:2", "uniform"), ("ramp:0:4", "ramp"), ("onoff:2", "onoff"), ("burst", "burst"),
     ("ramp:1:9", "ramp:1:9"), ("wait:2", "wait:2")],
)  # fmt: skip
def test_every_open_load_is_the_same_in_both_worlds(load: str, arrivals: str, tmp_path: Path) -> None:
    planned = sent("--workload", "fixed:4:2", "--numsamples", str(NUM), "--load", load)
    rate = [] if ":" in arrivals or arrivals == "burst" else ["--rate", "2"]
    _, result = simulated(tmp_path / "out", "--workload", "fixed:4:2", "--num", str(NUM), "--arrivals", arrivals, *rate)
    assert result["trace_sha256"] == trace_sha256(planned)


def test_a_sharegpt_file_is_simulated_with_its_recorded_lengths(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    said = [{"from": "human", "value": "we come to the king"}, {"from": "gpt", "value": "the king is not in the house"}]
    file.write_text(json.dumps([{"conversations": said}]))
    planned = sent("--workload", f"sharegpt:{file}", "--numsamples", "3")
    rows, result = simulated(tmp_path / "out", "--workload", f"sharegpt:{file}", "--num", "3", "--rate", "1")
    assert [row["asked_tokens"] for row in rows] == ["7"] * 3
    assert result["trace_sha256"] == trace_sha256(planned)


@pytest.mark.parametrize("spec", catalog.OWN_LENGTHS)
def test_lengths_that_only_a_model_knows_are_not_simulated(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "dynamic", "--workload", spec, "--num", "5"]) == 2
    assert "--trace run.csv" in capsys.readouterr().err


def test_agents_find_all_of_their_turns_before_in_a_cache_that_is_large_enough(tmp_path: Path) -> None:
    planned = sent("--workload", "agent:6", "--numsamples", str(NUM), "--rate", "3")
    size = ("--kv-tokens", "100000", "--page-size", "1")
    rows, _ = simulated(tmp_path / "out", "--workload", "agent:6", "--num", str(NUM), "--rate", "3", *size)
    assert sorted(int(row["asked_tokens"]) for row in rows) == sorted(p.num_tokens for p in planned)
    turns: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        turns.setdefault(row["client"], []).append(row)
    assert len(turns) == len({p.user for p in planned}) < NUM
    for of_agent in turns.values():
        for before, row in pairwise(of_agent):
            whole = int(before["prompt_tokens"]) + int(before["asked_tokens"])
            assert int(row["prompt_tokens"]) > whole
            assert int(row["cached_tokens"]) == whole - 1
            assert float(row["arrival_s"]) > float(before["arrival_s"])


@pytest.mark.parametrize("content", [TRACE, BLOCKS])
def test_a_replayed_trace_is_the_same_in_both_worlds(content: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(content)
    planned = sent("--workload", f"trace:{file}:2")
    rows, result = simulated(tmp_path / "out", "--workload", f"trace:{file}:2")
    assert result["trace_sha256"] == trace_sha256(planned)
    for tokenizer in tokenizers():
        assert [len(tokenizer.encode_ordinary(p.prompt)) for p in planned] == [int(r["prompt_tokens"]) for r in rows]


@pytest.mark.parametrize("spec", ["original", "shared-prefix:3:40", "drawn-turns:3", "orca"])
def test_prompts_share_as_many_tokens_as_the_simulator_has_them_share(spec: str) -> None:
    def common(a: list[Any], b: list[Any]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    texts = [p.prompt for p in sent("--workload", spec, "--numsamples", str(NUM))]
    for tokenizer in tokenizers():
        ids = [tokenizer.encode_ordinary(text) for text in texts]
        for a in range(NUM):
            for b in range(a):
                assert common(ids[a], ids[b]) == common(corpus.split(texts[a]), corpus.split(texts[b]))


def test_every_word_of_the_plays_is_one_token() -> None:
    lines = corpus.FILE.read_text().splitlines()
    for tokenizer in tokenizers():
        assert all(
            len(tokenizer.encode_ordinary(f" {word}")) == 1 for word in {w for line in lines for w in line.split()}
        )
        assert all(len(tokenizer.encode_ordinary(word)) == 1 for word in {line.split()[0] for line in lines})
