"""Pictures and page: drawn from a folder of results, complete without a network, safe with any text."""

import base64
import csv
import gzip
import html
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from client.report import __main__ as report_command
from client.report import album, measure, page, plots, plots_steps, plots_sweep, race, store, summary, waste
from client.report.album import Album
from scheduling.iteration import SlotSteps
from terminal.console import table_of
from tests.support import ROOT


def step(n: int) -> dict[str, Any]:
    phases = ["prefill" if n == 0 else "decode", "held" if n > 2 else "decode"]
    members = [{"id": f"r{i}", "slot": i, "phase": p} for i, p in enumerate(phases)]
    return {"n": n, "t": n * 0.1, "queue": max(0, 3 - n), "members": members}


def facts(load: str) -> dict[str, Any]:
    engine = {
        "model": "bard", "slot_steps": {"useful": 30, "held": 10, "idle": 60}, "drafts": {"tokens": 8, "accepted": 4},
    }  # fmt: skip
    return {
        "seed": 1, "trace_sha256": "t", "request_rate": 1.0, "num_prompts": 12, "warmup_requests": 0, "config": {},
        "machine": {"cpus": 2, "processor": "a CPU"}, "versions": {}, "server_before": None, "server_after": {"engine": engine},
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> Iterator[None]:
    """Draw no PNG beside each SVG: tests/client/test_speculation_report.py does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(album.FigureCanvasAgg, "print_png", lambda canvas, path: path.touch())
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a comparison, and draw its page once: pictures take their time."""
    tmp_path = tmp_path_factory.mktemp("results")
    head = {"name": "a <b>", "seed": 7, "workload": "fixed", "command": "./eb compare",
            "machine": {"cpus": 2, "processor": "a CPU"}, "versions": {}, "date": "2026-11-20"}  # fmt: skip
    kept = store.Store(tmp_path / "x", head)
    for policy, speed in (("static", 1.0), ("vllm", 0.4)):
        for load in ("poisson:1", "burst"):
            labels = {"policy": policy, "load": load, "repeat": 0}
            record = kept.record(labels)
            outcomes = [
                measure.Outcome(
                    i, 5 + i, 0.1 * i, 0.1 * i, 0.1 * i + speed * (5 + i), tokens=5 + i,
                    first=0.1 * i + 0.05, gaps=(0.1, 0.2), chunks=(1, 1, 1),
                )
                for i in range(12)
            ]  # fmt: skip
            for outcome in outcomes:
                record(outcome)
            kept.add(labels, measure.result(outcomes, **facts(load)))
            for n in range(8):
                kept.iterations.write(json.dumps({**labels, **step(n)}) + "\n")
    kept.warn("static: <script>alert(1)</script>")
    kept.close()
    page.write(tmp_path / "x")
    return tmp_path / "x"


def test_the_page_has_every_plot_and_needs_no_network(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    names = {path.stem for path in (folder / "plots").glob("*.png")}
    wanted = {
        "latency-cdf", "waste", "latency-over-tokens.burst", "ttft-itl.burst",
        "in-system.burst", "batch-over-time.burst", "queue-over-time.burst",
        "slots.static.burst", "slots.vllm.poisson-1",
    }  # fmt: skip
    assert wanted <= names
    for name in names:
        assert (folder / "plots" / f"{name}.svg").is_file()
    assert page.count('<figure><img src="data:image/svg+xml') == len(names)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert not re.search(r"url\((?!#)", page)
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)


def test_at_most_eight_pictures_come_before_the_others_and_text_is_escaped(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    shown, folded = page.split('<details class="more">')
    assert 4 <= shown.count("<figure>") <= 8
    assert folded.count("<figure>") >= 8
    assert "Slots of static, burst" in shown
    assert "<script>" not in page
    assert "a &lt;b&gt;" in page
    assert page.index("&lt;script&gt;") < page.index("<table>")


def test_the_verdict_names_what_the_most_wasteful_policy_wasted(folder: Path) -> None:
    results = store.read(folder)
    assert "25% of the rows that static computed" in summary.headline(results)
    for run in results.runs:
        run["rows_in_vain"] = 0.0
    assert "wasted" not in summary.headline(results)


def test_the_same_results_give_the_same_pictures(folder: Path) -> None:
    before = (folder / "plots" / "waste.svg").read_bytes()
    plots.waste(Album(store.read(folder), []))
    assert (folder / "plots" / "waste.svg").read_bytes() == before


def test_a_policy_has_the_same_color_everywhere(folder: Path) -> None:
    drawn = Album(store.read(folder), [])
    looks = [drawn.look(policy)["color"] for policy in drawn.results.policies]
    assert looks == [album.KNOWN["static"], album.OTHERS[0]]
    caption = drawn.caption("3 requests")
    assert caption == "n = 3 requests · bard · a CPU, 2 CPUs · seed 1 · 2026-11-20"


def test_waste_is_the_difference_of_two_readings() -> None:
    before = {"engine": {"slot_steps": {"useful": 10}}}
    after = {"engine": {"slot_steps": {"useful": 25, "idle": 5},
                        "kv": {"query_tokens": 50, "hit_tokens": 20}}}  # fmt: skip
    numbers = {"server_before": before, "server_after": after}
    assert store.grown(numbers, "slot_steps") == {"useful": 15, "idle": 5}
    assert store.hit_share(numbers) == 0.4
    assert store.grown({"server_before": None, "server_after": None}, "slot_steps") == {}


def test_preemptions_are_in_the_table_only_if_there_were_any(folder: Path) -> None:
    results = store.read(folder)
    assert "preemptions" not in summary.markdown(results)
    before, after = {"engine": {"preemptions": 2}}, {"engine": {"preemptions": 1236}}
    results.runs[0]["preemptions"] = store.grown({"server_before": before, "server_after": after})["preemptions"]
    for run in results.runs[1:]:
        run["preemptions"] = 0
    heads, lines = summary.rows(results, results.loads)
    assert lines[0][heads.index("preemptions")] == "1,234"
    assert "preemptions" not in store.grown({"server_before": None, "server_after": None})


def test_the_slots_plot_shows_the_busiest_steps() -> None:
    empty = [{"n": n, "members": []} for n in range(900)]
    full = [{"n": 900 + n, "members": [{}] * 4} for n in range(600)]
    assert plots_steps.busiest(empty + full) == full
    assert plots_steps.busiest(full) == full


def test_a_sweep_has_its_curves_the_saturation_and_bands_over_repeats(folder: Path) -> None:
    results = store.read(folder)
    results.runs[:] = [run | {"output_throughput": 100.0 + k} for run in results.runs for k in range(3)]
    results.summary["sweep"] = {"over": "rate", "values": [1, 2], "saturation": {"static": 2}}
    for run in results.runs:
        run["value"] = 1 if run["load"] == "burst" else 2
    drawn = Album(results, [])
    for draw in (plots_sweep.overview, plots_sweep.throughput_latency):
        draw(drawn)
    names = {picture.name for picture in drawn.pictures}
    assert names == {"sweep", "throughput-latency"}
    figures = ("ttft_ms", "itl_ms", "e2el_ms", "tpot_ms", "output_throughput", "tokens_per_step", "acceptance")
    assert tuple(each[0] for each in plots_sweep.known(drawn)) == figures
    with (folder / "plots" / "sweep.csv").open(newline="") as file:
        (point,) = (
            line for line in csv.DictReader(file)
            if (line["policy"], line["value"], line["figure"]) == ("static", "1.0", "output_throughput")
        )  # fmt: skip
    assert (float(point["mean"]), point["runs"]) == (101.0, "3")
    # Student's t of 2 degrees of freedom is 4.303, and the error of the mean 1 / sqrt(3).
    assert float(point["high"]) - 101 == pytest.approx(4.303 / 3**0.5, rel=0.04)


def test_an_interrupted_run_has_a_page(tmp_path: Path) -> None:
    kept = store.Store(tmp_path / "x", {"seed": 1, "name": "cut"})
    kept.close()
    assert "Nothing was measured." in page.write(tmp_path / "x").read_text()
    assert report_command.main([str(tmp_path / "nothing")]) == 2


def test_the_client_needs_no_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from client import client, compare, sweep, graph\n"
        "print('pyplot' in str(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def test_the_race_leaves_out_the_warm_up() -> None:
    def steps(policy: str, load: str) -> list[dict[str, Any]]:
        ids = ["warm", "warm", f"{policy}-1", f"{policy}-1"]
        return [
            {"n": n, "t": n * 0.1, "members": [{"id": id}], "slot_steps": {"useful": 1}} for n, id in enumerate(ids)
        ]

    rows = [{"policy": p, "load": "burst", "id": f"{p}-1"} for p in ("static", "dynamic")]
    results: Any = SimpleNamespace(loads=["burst"], policies=["static", "dynamic"], requests=rows, iterations=steps)
    page = html.unescape(race.embed(results))
    packed = re.search(r'id="recorded">([^<]+)<', page)
    assert packed is not None
    (told,) = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert {p: [s["n"] for s in of] for p, of in told["runs"].items()} == {"static": [2, 3], "dynamic": [2, 3]}
    assert not re.search(r'src="|href="web', page)
    results.policies = ["static"]
    assert race.embed(results) == ""


def test_the_tables_of_a_terminal_fit_80_columns(folder: Path) -> None:
    with io.StringIO() as out:
        Console(file=out, width=80).print(*summary.short_tables(store.read(folder)))
        lines = out.getvalue().splitlines()
    assert not any("…" in line for line in lines)
    assert {"static", "vllm"} <= {line.split()[0] for line in lines if line.strip()}


@pytest.mark.parametrize("width", [120, 80, 60, 45])
def test_a_table_that_has_room_for_its_words_breaks_none_and_loses_no_column(width: int) -> None:
    row = ["dynamic+admission", "9,999", "1 to 2", "the queue grows", "7"]
    with io.StringIO() as out:
        Console(file=out, width=width).print(
            table_of("title", ["policy", "slots", "90 % interval", "binds", "end"], [row])
        )
        lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert {*" ".join(row).split()} <= {*" ".join(lines).split()}


def test_batch_fill_and_wasted_rows_are_told_apart_as_the_server_does() -> None:
    static = {"useful": 30, "padding": 5, "held": 15, "idle": 50, "recomputed": 0}
    assert waste.fill(static) == pytest.approx(0.5)
    assert waste.wasted(static) == pytest.approx(0.4)
    counted = SlotSteps(**static)
    assert (counted.fill, counted.in_vain) == (waste.fill(static), waste.wasted(static))
    assert (waste.fill({}), waste.wasted({"idle": 3})) == (None, None)
    assert waste.percentages({"useful": 1, "held": 1, "idle": 1}) == {
        "useful": 34, "padding": 0, "held": 33, "idle": 33, "recomputed": 0, "rejected": 0
    }  # fmt: skip
    assert len(waste.bar(static, 40).plain.splitlines()[0]) == 40


def test_waste_has_the_colors_of_the_page_and_no_color_of_a_policy() -> None:
    style = (ROOT / "web" / "style.css").read_text()
    assert all(f"--{kind}: {color};" in style for kind, color in waste.COLORS.items())
    policies = {color.lower() for color in (*album.KNOWN.values(), *album.OTHERS)}
    assert not policies & set(waste.COLORS.values())
