"""The folder of a comparison: how it is written during the runs, and how it is read again.

summary.json has each run's figures without arrays, runs/*.json with them; requests.csv has a line for each request,
programs.csv one for each program, arrivals.*.csv the plan (the same bytes for the same seed), iterations.jsonl the server's steps.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from . import waste
from .measure import Outcome

LABELS = ("policy", "load", "repeat")
ARRAYS = ("input_lens", "cached_lens", "output_lens", "asked_lens", "start_times", "ttfts", "itls", "e2els", "errors",
          "server_before", "server_after", "program_times")  # fmt: skip
# Of requests.csv, and of the file of --csv.
COLUMNS = (
    "index", "id", "client", "arrival_s", "sent_s", "prompt_tokens", "cached_tokens", "asked_tokens",
    "output_tokens", "queue_s", "ttft_s", "tpot_s", "latency_s", "batch_mean", "batch_max", "outcome",
    "max_tokens", "program",
)  # fmt: skip


class Record:
    """Writes a CSV line for each request as soon as it ends, so that nothing measured is lost."""

    def __init__(self, file: TextIO, names: Sequence[str] = ()) -> None:
        self._file = file
        self._writer = csv.writer(file, lineterminator="\n")
        self.labels: list[Any] = []  # the values of `names`, which begin each line
        self._writer.writerow([*names, *COLUMNS])

    def write(self, outcome: Outcome) -> None:
        """Write one line and flush it."""
        cells = row(outcome).items()
        times = (f"{value:.6f}" if name.endswith("_s") and value is not None else value for name, value in cells)
        self._writer.writerow([*self.labels, *times])
        self._file.flush()


def row(o: Outcome) -> dict[str, Any]:
    """Return a request as a flat row; times are seconds, `arrival_s` and `sent_s` since the start of the run."""
    return dict(zip(COLUMNS, (
        o.index, o.id, o.user, o.intended, o.sent, o.prompt_tokens, o.cached_tokens, o.asked_tokens, o.tokens,
        o.queue, o.ttft, o.tpot, o.latency, o.batch_mean, o.batch_max, o.error or "complete", o.max_tokens, o.program,
    )))  # fmt: skip


def outcome_of(line: Mapping[str, str]) -> Outcome:
    """Return the outcome of a complete request from its line, as far as it is there; older files have no max_tokens."""

    def number(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    def whole(name: str, usual: str = "") -> int | None:
        return int(text) if (text := line.get(name, usual)) else None

    at, ttft = float(line["arrival_s"]), number("ttft_s")
    return Outcome(
        int(line["index"]), int(line["asked_tokens"]), at, float(line["sent_s"]), at + float(line["latency_s"]),
        int(line["output_tokens"]), first=None if ttft is None else at + ttft, prompt_tokens=whole("prompt_tokens"),
        cached_tokens=whole("cached_tokens"), queue=number("queue_s"), id=line["id"], user=line["client"],
        max_tokens=whole("max_tokens", line["asked_tokens"]),
    )  # fmt: skip


class Store:
    """Writes a comparison as it goes on, so that nothing measured is lost if it is interrupted."""

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        self.folder = folder
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        self.summary: dict[str, Any] = {**head, "warnings": [], "runs": []}
        self._requests = (folder / "requests.csv").open("w", newline="", encoding="utf-8")
        self._record = Record(self._requests, LABELS)
        self.iterations = (folder / "iterations.jsonl").open("w", encoding="utf-8")
        self.save()

    def record(self, labels: Mapping[str, Any]) -> Callable[[Outcome], None]:
        """Return the function that writes the outcomes of this run."""
        self._record.labels = [labels[name] for name in LABELS]
        return self._record.write

    def add(self, labels: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Write a run's figures."""
        file_of(self.folder, labels).write_text(json.dumps({**numbers, **labels}) + "\n")
        if each := numbers.get("program_times"):
            with (self.folder / "programs.csv").open("a", newline="", encoding="utf-8") as file:
                lines = [(*LABELS, *each[0])] * (not file.tell())
                lines += [(*(labels[name] for name in LABELS), *one.values()) for one in each]
                csv.writer(file, lineterminator="\n").writerows(lines)
        self.summary["runs"].append({**short(numbers), **labels})
        self.save()

    def warn(self, text: str) -> None:
        """Write a warning, to be shown above the figures."""
        self.summary["warnings"].append(text)
        self.save()

    def save(self) -> None:
        """Replace the summary atomically."""
        temporary = self.folder / "summary.json.part"
        temporary.write_text(json.dumps(self.summary, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.folder / "summary.json")

    def close(self) -> None:
        """Close the files and delete iterations.jsonl if it is empty."""
        self._requests.close()
        self.iterations.close()
        path = self.folder / "iterations.jsonl"
        if path.exists() and not path.stat().st_size:
            path.unlink()


def short(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's figures without arrays, and with all that tables show, which then need no readings of `/stats`."""
    spent = grown(numbers, "slot_steps")
    derived = {
        "hit_tokens": hit_share(numbers), "preemptions": grown(numbers).get("preemptions"), **speculation(numbers),
        "slot_steps": spent or None, "batch_fill": waste.fill(spent), "rows_in_vain": waste.wasted(spent),
    }  # fmt: skip
    # What a worker of a sweep has derived stays.
    return {**derived, **{key: value for key, value in numbers.items() if key not in ARRAYS}}


def grown(numbers: Mapping[str, Any], part: str = "") -> dict[str, Any]:
    """Return by how much each number of the engine's `/stats`, or of a part of it, grew during a run; empty if unknown."""
    before, after = ((numbers.get(key) or {}).get("engine") or {} for key in ("server_before", "server_after"))
    if part:
        before, after = before.get(part) or {}, after.get(part) or {}
    return {name: n - (before.get(name) or 0) for name, n in after.items() if isinstance(n, int | float)}


def hit_share(numbers: Mapping[str, Any]) -> float | None:
    """Return the share of prompt tokens that came from the prefix cache during a run; None if it is unknown."""
    kv = grown(numbers, "kv")
    return kv.get("hit_tokens", 0) / kv["query_tokens"] if kv.get("query_tokens", 0) > 0 else None


def speculation(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of draft tokens that were accepted, and the tokens of a request in a step that decodes it.

    Nothing for a server that computed no draft tokens during the run.
    """
    drafts = grown(numbers, "drafts")
    drafted, accepted = drafts.get("tokens", 0), drafts.get("accepted", 0)
    decoded = numbers["total_output_tokens"] - numbers["completed"]  # the first token is of the prompt's step
    if drafted <= 0 or decoded <= accepted:
        return {}
    return {"acceptance": accepted / drafted, "tokens_per_step": decoded / (decoded - accepted)}


def file_of(folder: Path, labels: Mapping[str, Any]) -> Path:
    """Return the file of a run's figures with their arrays."""
    return folder / "runs" / (".".join(slug(str(labels[key])) for key in LABELS) + ".json")


def slug(text: str) -> str:
    """Return a file name for a policy, an address or a load."""
    return re.sub(r"[^A-Za-z0-9_+-]+", "-", text).strip("-") or "x"


@dataclass(slots=True)
class Results:
    """A comparison read from its folder."""

    folder: Path
    summary: dict[str, Any]
    requests: list[dict[str, str]]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The figures of each run."""
        runs: list[dict[str, Any]] = self.summary["runs"]
        return runs

    @property
    def policies(self) -> list[str]:
        """The policies in order."""
        return list(dict.fromkeys(run["policy"] for run in self.runs))

    @property
    def loads(self) -> list[str]:
        """The loads in order."""
        return list(dict.fromkeys(run["load"] for run in self.runs))

    @property
    def lightest(self) -> str:
        """The first load that is not the burst, if there is one: loads are given in ascending order."""
        return next((load for load in self.loads if load != "burst"), self.loads[0])

    @property
    def heaviest(self) -> str:
        """The burst, if there is one; otherwise the last load."""
        return "burst" if "burst" in self.loads else self.loads[-1]

    def of(self, policy: str, load: str) -> list[dict[str, Any]]:
        """Return the repeats of a policy under a load."""
        return [r for r in self.runs if (r["policy"], r["load"]) == (policy, load)]

    def lines(self, policy: str, load: str) -> list[dict[str, str]]:
        """Return the complete requests of a policy under a load."""
        return [r for r in self.requests if (r["policy"], r["load"], r["outcome"]) == (policy, load, "complete")]

    def column(self, policy: str, load: str, name: str) -> list[float]:
        """Return a number of each complete request that has it."""
        return [float(r[name]) for r in self.lines(policy, load) if r[name]]

    def pairs(self, policy: str, load: str, x: str, y: str) -> list[tuple[float, float]]:
        """Return two numbers of each complete request that has both."""
        return [(float(r[x]), float(r[y])) for r in self.lines(policy, load) if r.get(x) and r.get(y)]

    def whole(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run with its arrays from its own file; empty if that is missing."""
        path = file_of(self.folder, run)
        return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}

    def arrays(self, policy: str, load: str, name: str) -> list[Any]:
        """Return an array of all repeats together, from their own files."""
        return [value for run in self.of(policy, load) for value in self.whole(run).get(name) or []]

    def iterations(self, policy: str, load: str, repeat: int = 0) -> list[dict[str, Any]]:
        """Return the server's steps of one repeat; empty if the server has no /events."""
        path = self.folder / "iterations.jsonl"
        steps: list[dict[str, Any]] = []
        if not path.is_file():
            return steps
        # The recorder writes the labels first, in this order, so that other runs' lines need not be parsed.
        mark = json.dumps({"policy": policy, "load": load, "repeat": repeat})[:-1] + ","
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(mark):
                    with contextlib.suppress(ValueError):  # the last line of an interrupted run
                        steps.append(json.loads(line))
        return steps

    def _predicted(self) -> list[dict[str, Any]]:
        """Return the simulator's figures of each run; empty if there are none."""
        path = self.folder / "simulated.json"
        return list(json.loads(path.read_text("utf-8"))["compared"]) if path.is_file() else []

    def blame(self, policy: str, load: str) -> dict[str, Any] | None:
        """Return which clients made which wait, in the first run that was simulated with this policy and load."""
        known = [run.get("simulation") or {} for run in self.of(policy, load)]
        known += [run for run in self._predicted() if (run["policy"], run["load"]) == (policy, load)]
        return next((run["blame"] for run in known if "blame" in run), None)

    @property
    def simulated(self) -> list[dict[str, str]]:
        """The simulator's predictions, one per request; empty if there are none."""
        path = self.folder / "simulated.csv"
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def intervals(self, load: str) -> Iterator[tuple[str, str, list[float]]]:
        """Yield policy, statistic and (measured, simulated, low, high) seconds where the simulator says how sure it is."""
        for run in self._predicted():
            for statistic in ("mean", "p99") if run["load"] == load and run.get("intervals") else ():
                bounds = run["intervals"][f"{statistic} latency"]
                yield run["policy"], statistic, [run[f"{statistic}_s"], run[f"simulated_{statistic}_s"], *bounds]


def read(folder: Path) -> Results:
    """Read a comparison; raise ValueError if there is none."""
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        with (folder / "requests.csv").open(newline="", encoding="utf-8") as file:
            requests = list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        reason = f"it has no {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else error
        inside = sorted(str(path.parent) for path in folder.glob("*/summary.json"))
        remedy = f"Use one inside it, such as {inside[-1]!r}" if inside else "Use a folder written by client.compare"
        raise ValueError(f"{str(folder)!r} is not a comparison: {reason}. {remedy}") from error
    return Results(folder, summary, requests)
