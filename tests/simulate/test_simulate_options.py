"""Each option of each command of the simulator changes the result or is refused; none is accepted and dropped.

An option that a command gains needs a line in CASES: what is on the command line beside it, and its value.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config import flag
from costs.cost import Affine, Host
from simulate.__main__ import COMMANDS, build_command, main
from simulate.arena.grade import Grade
from simulate.board.figures import read_table
from simulate.commands import check, grade, new, papers, try_out
from simulate.laws.check import Verdict
from simulate.measured import calibrate, validate
from tests.support import points

SMALL = "--num 30 --rate 6 --max-batch-size 4"
# What says when, where and of what a run was, and would differ though the option did nothing.
LABELS = {"date", "config", "model_id", "server_after", "machine", "versions", "seed", "trace_sha256"}
Cases = dict[str, tuple[str, str]]


def beside(base: str, **values: str) -> Cases:
    """Return cases of options with these values, on this command line."""
    return {flag(name): (base, value) for name, value in values.items()}


ENGINE = {
    **beside("dynamic {small}", cost="llm-mock", cost_option="row=0.01"),
    "--policy-option": ("window {small}", "delay=0.5"),
    "--engine": ("dynamic {small} --cost distserve-opt13b", "aligned"),
    "--max-batch-size": ("dynamic --num 100 --rate 6", "3"),
    "--max-tokens-per-step": ("dynamic {small} --workload orca", "32"),
}
SIMULATED_ENGINE = {  # of a real server, its own settings say it
    **beside("dynamic {small}", kv_tokens="320", acceptance="0.7"),
    "--page-size": ("dynamic {small} --kv-tokens 640", "64"),
    "--drafts": ("dynamic {small} --acceptance 0.7", "2"),
}
ARRIVALS = {
    **beside("dynamic {small}", workload="orca", arrivals="gamma", context="120", seed="7"),
    **beside("dynamic --trace TRACE", speed="1.5"),
    **beside("dynamic --num 60", rate="3", trace="TRACE"),
    "--num": ("dynamic --num 50", "70"),
    "--open-loop": ("dynamic --num 50 --workload agents", ""),
    "--clients": ("dynamic+vtc {small}", "3"),
    "--priorities": ("dynamic+priority {small}", "3"),
    "--slo": ("dynamic+edf {small}", "0.5 30"),
}
SIMULATED = {**ENGINE, **SIMULATED_ENGINE, **ARRIVALS}


def _for(command: str, small: str) -> Cases:
    return {option: (f"{command} {base.format(small=small)}", value) for option, (base, value) in SIMULATED.items()}


SERVER_VALUES = {
    "model": "bard", "load_format": "dummy", "device": "cpu",
    "dtype": "float32", "quantize": "int8", "kv_dtype": "int8", "batch_invariant": "on", "tokenizer_file": "TRACE", "end_of_text": "text",
    "prefix_cache": "off", "trusted_hosts": "here", "cors_origins": "http://here", "overload_status": "503",
    "access_log": "off", "evict": "ttl", "dashboard_show_text": "on", "max_connections": "9000",
}  # fmt: skip
PREFIX = "prefix --train 60 --sizes 0 640 --batches 4 --share 40"
SWEPT = "--num 30 --rates 6 --max-batch-size 4 --repeats 1 --jobs 1 --no-plots --out OUT/s"
PLAN, FLEET, RUN = "plan dynamic --num 100", f"fleet dynamic {SMALL}", f"run dynamic {SMALL}"
SCALED = "fleet dynamic --num 300 --rate 20 --max-batch-size 4 --replicas 1..4 --autoscaler requests:4"
VALIDATE = "validate dynamic --cost llm-mock"
FIT = "fit LOG --engine vllm --out OUT/cost"
ADVERSARY = "adversary static --requests 4 --tries 20 --out OUT/a.csv"
CASES: dict[str, Cases] = {
    "run": {
        **_for("run", SMALL),
        **beside(RUN, out="OUT/b --no-plots", ttft="0.5", tpot="0.01", e2el="1"),
        **beside(f"{RUN} --out OUT/b", no_plots=""),
        **beside(f"{RUN} --out OUT/b --no-plots", no_records=""),
        **beside(f"{RUN} --kv-tokens 640", open_ended=""),
        **beside(RUN, repeats="2"),
        "--evict": ("run dynamic --workload agent:8 --num 150 --rate 1 --max-batch-size 4 --kv-tokens 1600", "ttl"),
        "--blame": ("run dynamic --num 12 --rate 6 --max-batch-size 2", ""),
        "--program": ("run dynamic --num 4 --rate 5 --workload agents --max-batch-size 2 --blame", "program-0"),
        "--save-trace": ("run dynamic --num 5 --workload agents", "OUT/t.jsonl"),
    },
    "sweep": {
        **{option: case for option, case in _for("sweep", SWEPT).items() if option not in ("--rate", "--speed")},
        **beside(f"sweep dynamic {SWEPT}", rates="3 6", repeats="2", jobs="2", e2el="1", tpot="0.01", ttft="0.5"),
        **beside(f"sweep dynamic {SWEPT}", num="50", trace="TRACE", out="OUT/b"),
        "--max-batch-size": (f"sweep dynamic {SWEPT}", "2"),
        "--no-plots": ("sweep dynamic --num 30 --rates 6 --repeats 1 --jobs 1 --out OUT/s", ""),
        "--open-loop": (f"sweep dynamic {SWEPT} --workload agents", ""),
    },
    "plan": {
        **_for("plan", "--num 100"),
        **beside(PLAN, cost="constant", max_batch_size="3", rate="90", ttft="0.02", itl="0.012", limit="p50:e2el:0.9"),
        **beside(PLAN, slots="2 4"),
        "--policy-option": ("plan window --num 100 --max-batch-size 8", "delay=0.9"),
        "--engine": ("plan dynamic --num 100 --max-batch-size 8 --cost distserve-opt13b", "aligned"),
        "--max-tokens-per-step": (f"{PLAN} --workload orca --max-batch-size 4", "16"),
        "--clients": ("plan dynamic+vtc --num 100 --max-batch-size 2", "3"),
        "--priorities": ("plan dynamic+priority --num 100 --max-batch-size 2", "3"),
        "--slo": ("plan dynamic+edf --num 100 --max-batch-size 2", "0.5 30"),
    },
    "fleet": {
        **_for("fleet", "--num 40 --rate 20 --max-batch-size 4 --replicas 2"),
        **beside(FLEET, replicas="3", router="random", prefill_replicas="2", ttft="0.012", tpot="0.005", e2el="1"),
        **beside(SCALED, autoscaler="requests:1", startup="1", upscale_delay="5", downscale_delay="2"),
        **beside(f"{FLEET} --prefill-replicas 2", transfer_gbps="0.01", kv_bytes="100000000"),
        "--max-batch-size": ("fleet dynamic --num 100 --rate 9 --replicas 1", "3"),
    },
    "prefix": {
        **beside(PREFIX, cost="oracle-a", kinds="trie"),
        **beside("prefix --train 60 --sizes 640 --batches 4 --share 40", sizes="320", train="30"),
        "--batches": ("prefix --train 60 --sizes 640 --share 40", "3"),
        "--share": ("prefix --train 60 --sizes 640 --batches 4", "80"),
    },
    "calibrate": {
        **beside("calibrate --out OUT/cost.json", model="bard", load_format="dummy", dtype="float32", quantize="int8"),
        **beside("calibrate --out OUT/cost.json", kv_dtype="int8", threads="1", grid="full", max_tokens_per_step="64"),
        **beside("calibrate --out OUT/cost.json", steps="2", context="4096", record="RECORD"),
        "--out": ("calibrate --out OUT/other.json", "OUT/cost.json"),
    },
    "validate": {
        **beside(VALIDATE, **{name: SERVER_VALUES.get(name, "7") for name in validate.SERVER}),
        **beside(VALIDATE, cost="oracle-a", cost_option="base=0.01", max_batch_size="3", max_tokens_per_step="64"),
        **beside(VALIDATE, rate="2", num="5", seed="1", workload="react:2"),
        "--policy-option": ("validate window --cost llm-mock", "delay=0.5"),
        "--engine": ("validate dynamic --cost distserve-opt13b", "aligned"),
    },
    "probe": beside(
        "probe http://here --engine vllm --log OUT/log --out OUT/cost", tokens="3000", minutes="1", dry_run="", engine="tgi", port="9000",
        slots="3", model="bard", api="tgi", api_key="secret", timeout="9", log="OUT/a.jsonl", out="OUT/b.json",
    ),
    "fit": {
        **beside(FIT, engine="sglang", port="9000", slots="3", max_tokens_per_step="300", kv_tokens="999"),
        **beside(FIT, policy_option="overlap=off", held_out="25", out="OUT/b.json"),
        **beside(f"{FIT} http://here", api_key="secret"),
    },
    "try": beside("try MINE", workload="orca", rate="5", num="20", max_batch_size="3", seed="1", out="OUT/a"),
    "arena": {
        **beside(
            "arena static --only --workloads uniform --seeds 1 --num 30 --jobs 1", by="p99", workloads="orca", seeds="2", seed="5",
            num="40", load="0.5", cost="affine", max_batch_size="3", jobs="2",
        ),
        "--only": ("arena static --workloads uniform --seeds 1 --num 10 --jobs 1", ""),
        "--kv-tokens": ("arena static --only --workloads orca --seeds 1 --num 50 --jobs 1", "2048"),
    },
    "adversary": {
        **{option: (ADVERSARY, value) for option, (_, value) in ENGINE.items()},
        **beside(ADVERSARY, against="bound", measure="slowdown", requests="3", longest="30", tries="10", seed="1"),
        **beside(ADVERSARY, out="OUT/b.csv"),
        "--engine": (f"{ADVERSARY} --cost distserve-opt13b", "aligned"),
        "--policy-option": (ADVERSARY.replace("static", "window"), "delay=0.5"),
    },
    "papers": beside("papers --quick --jobs 1", out="OUT", jobs="2") | beside("papers --jobs 1", quick=""),
    "grade": beside("grade fair dynamic", seed="3", csv="OUT/a.csv"),
    "check": {
        **beside("check window", cases="3", large_cases="3", seed="1", policy_option="delay=0.5", exhaustive=""),
        **beside("check window --exhaustive", requests="3", longest="2"),
    },
}  # fmt: skip


class Asked(ValueError):
    """Ends a command whose result takes a server, an engine or minutes; the text is all that it would be made from."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the cases name."""
    tmp_path = tmp_path_factory.mktemp("options")
    lines = [f"{0.2 * i:.1f},{20 + 7 * i % 60},{30 + 11 * i % 90}" for i in range(80)]
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines))
    block = {"timestamp_ms": 0, "input_length": 1100, "output_length": 9}
    blocks = [json.dumps({**block, "hash_ids": [1, 2, n % 3]}) for n in range(12)]
    (tmp_path / "mine.py").write_text(new.TEMPLATE.read_text())
    (tmp_path / "blocks.jsonl").write_text("\n".join(blocks))
    host = {"alpha0": 0.01, "alpha1": 0.02, "alpha2": 0.001, "sigma": 0.01, "poll": 0.0}
    seen = [{"sent": i, "prompt": 9, "output": 5, "first": i + 0.5, "last": i + 0.9} for i in range(8)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, [{"server": {}}, *seen])))
    member = {"id": "a", "slot": 0, "phase": "decode", "tokens": 1, "total": 99}
    steps = [{"t": 1.0 * n, "seconds": 0.5, "members": [{**member, "computed": n}], "left": []} for n in range(1, 40)]
    head = {"slots": 2, "tokens": 9, "pages": 9, "page_size": 16}
    (tmp_path / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (head, *steps)))
    cost = {"kind": "affine", "base": 0.008, "row": 0.0002, "token": 0.0001}
    (tmp_path / "cost.json").write_text(json.dumps({"cost": cost, "host": dict.fromkeys(host, 0.0)}))
    (tmp_path / "host.json").write_text(json.dumps({"cost": cost, "host": host}))
    return tmp_path


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands that need an engine or a server end with what they would have asked of it."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        raise Asked(repr((args, sorted(kwargs.items()))))

    def probe(flags: list[str], facts: Mapping[str, Any]) -> Any:
        """Time a step as its size and the flags say."""
        factor = 1 + zlib.crc32(repr(flags).encode())  # not `hash`, which differs from run to run
        return lambda points: [factor * (1 + p.decodes + p.prefills * p.chunk) for p in points]

    def fit(log: Any, kind: Any, given: Any, console: Any) -> Any:
        """Return as a fit what it was to be made from."""
        sources, scenario = repr((log.server, log.first, kind.name, given)), SimpleNamespace(host=Host())
        return SimpleNamespace(
            law=Affine(), scenario=scenario, sources=sources, misfit={}, doubts=(), guesses=lambda *times: "",
            replay=lambda law: SimpleNamespace(sequences=[]),
        )  # fmt: skip

    class Load:
        """Sends nothing, and says what it was to send as the tokens that it spent."""

        rows, left_out = [{"id": "a"}], ()

        def __init__(self, target: Any, phases: Any, tokens: int, until: float, rng: Any) -> None:
            asked = (target, target.api_key, tokens, round((until - time.perf_counter()) / 10))
            self.spent = zlib.crc32(repr(asked).encode())

        def run(self) -> None:
            return

    for name, result in {"read": None, "fetch_context": None, "fit": None, "save": None, "report": None}.items():
        monkeypatch.setattr(f"simulate.commands.probe.{name}", lambda *given, result=result: result)
    monkeypatch.setattr("simulate.commands.probe.Probe", Load)
    monkeypatch.setattr("client.send.ask.facts", lambda url, key: {"slots": 7, "version": key})
    for name, result in {"fit": fit, "report": None, "save": None, "compare": []}.items():
        function = result if callable(result) else lambda *given, result=result: result
        monkeypatch.setattr(f"simulate.commands.fit.{name}", function)
    monkeypatch.setattr("simulate.commands.probe.with_model", lambda target: target)
    monkeypatch.setattr(calibrate, "probe", probe)
    monkeypatch.setattr(validate, "validate", ask)
    monkeypatch.setattr(papers, "read_table", lambda: [each for each in read_table() if each.paper == "phipps"])
    monkeypatch.setattr(check, "check", ask)
    monkeypatch.setattr(check, "check_exhaustively", ask)
    monkeypatch.setattr(try_out, "check", lambda name, *args, **more: Verdict(name, 1))
    monkeypatch.setattr(try_out, "run_both", lambda given, *rest: ask(given.command_line))
    monkeypatch.setattr(try_out, "report", lambda given, *rest: ask("report", given.command_line))
    monkeypatch.setattr(
        grade, "grade_apart", lambda policy, lesson, seed, **more: Grade(policy, lesson, seed, f"asked {seed}")
    )


Outcome = tuple[int, str, set[str]]
SEEN: dict[str, Outcome] = {}  # a line gives the same again, so it is run once


def outcome(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run a command; return its exit code, its figures (or its error), and the files that it wrote."""
    if line not in SEEN:
        SEEN[line] = run(line, folder, folder / f"out-{len(SEEN)}", capsys)
    return SEEN[line]


def run(line: str, folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Outcome:
    out.mkdir()
    if line.startswith("papers"):
        (out / "results").mkdir()
        (out / "results" / "arena.json").write_text('{"never_best": ["fixed"]}')
    files = {
        "TRACE": "trace.csv", "BLOCKS": "blocks.jsonl", "HOSTCOST": "host.json", "COST": "cost.json", "MINE": "mine.py", "LOG": "log.jsonl", "RECORD": "record.jsonl",
    }  # fmt: skip
    places = {name: folder / path for name, path in files.items()} | {"OUT": out}
    parts = [word.partition("/") for word in line.split()]
    code = main([f"{places.get(first, first)}{slash}{rest}" for first, slash, rest in parts])
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1]) if captured.out else captured.err
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    return code, json.dumps(figures(told)).replace(str(out), "OUT"), written


def figures(told: Any) -> Any:
    """Return a result without its labels."""
    if isinstance(told, dict):
        return {key: figures(value) for key, value in told.items() if key not in LABELS}
    return [figures(value) for value in told] if isinstance(told, list) else told


def options_of(command: str) -> Iterator[str]:
    for option in build_command(command).params:
        yield from (name for name in option.opts if name.startswith("--"))


@pytest.mark.parametrize("command", CASES)
def test_every_option_has_a_case(command: str) -> None:
    assert COMMANDS.keys() - CASES.keys() == {"new", "advise"}
    assert set(options_of(command)) == set(CASES[command])


DRAWN = {("run", "--no-plots"), ("sweep", "--no-plots")}  # which take seconds
SHARED = {
    (command, option) for command in ("sweep", "plan", "fleet", "adversary") for option in SIMULATED
}  # `run` has them too
PAIRS = [
    pytest.param(
        option,
        base,
        value,
        id=f"{command} {option}",
        marks=pytest.mark.full if (command, option) in DRAWN | SHARED else (),
    )
    for command, cases in CASES.items()
    for option, (base, value) in cases.items()
    if option != "--jobs"  # which must not change it
]


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize(("option", "base", "value"), PAIRS)
def test_an_option_that_is_accepted_changes_the_result(
    option: str, base: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"{option}={value}" if value.startswith("--") else f"{option} {value}"
    before, after = (outcome(line, folder, capsys) for line in (base, f"{base} {named}"))
    assert before != after
    assert before[0] == after[0] or option in before[1]  # an error's remedy


@pytest.mark.parametrize("command", points(1, "run", "plan", "fleet"))
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workload", "orca"), ("--arrivals", "gamma"), ("--rate", "3"), ("--num", "40"), ("--speed", "3"),
        ("--context", "90"), ("--clients", "3"), ("--priorities", "3"), ("--slo", "1 9"), ("--seed", "3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arrivals", ["", "--trace TRACE", "--arrivals burst"])
def test_beside_a_trace_or_a_burst_an_option_is_used_or_refused(
    command: str, option: str, value: str, arrivals: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a policy that goes by none of the hints."""
    base = f"{command} dynamic --max-batch-size 4 {arrivals} " + ("" if arrivals == "--trace TRACE" else "--num 80")
    before = outcome(base, folder, capsys)
    after = outcome(f"{base} {option} {value}", folder, capsys)
    if after[0] == 2:
        assert after[1].count("\\n") == 1
        assert option in after[1] or "no steady rate" in after[1]
    else:
        assert after != before


@pytest.mark.parametrize("command", ["run", "plan --itl 0.03", "fleet", "prefix"])
def test_the_host_of_a_cost_file_counts_in_every_command(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, more = command.partition(" ")
    line = PREFIX if name == "prefix" else f"{name} dynamic {more} --num 60"
    free, busy = (json.loads(outcome(f"{line} --cost {cost}", folder, capsys)[1]) for cost in ("COST", "HOSTCOST"))
    free.pop("cost", None)
    busy.pop("cost", None)
    assert free != busy


def test_a_fleet_serves_every_policy_that_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(outcome(f"fleet dynamic static {SMALL}", folder, capsys)[1])
    assert [run["policy"] for run in told["runs"]] == ["dynamic", "static"]
    alone = json.loads(outcome(f"fleet static {SMALL}", folder, capsys)[1])
    assert told["runs"][1:] == alone["runs"]
