#!/usr/bin/env python3
"""Turn a recorded run into Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A thread is a slot, a slice is an uninterrupted phase of a request there, and counters show the queue, the batch and the
KV pages. A recording is lines of JSON from /events or dev/tools/record.py.

usage: dev/tools/trace_export.py run.jsonl run.trace.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PROCESS = 1
STEPS_THREAD = 1
FIRST_SLOT = 10  # thread of slot 0, after the steps
COLORS = {"prefill": "thread_state_running", "decode": "good", "held": "bad", "idle": "grey"}


def records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the steps among the lines, in their order."""
    for line in lines:
        line = line.removeprefix("data:").strip()
        if line.startswith("{"):
            value = json.loads(line)
            if "members" in value and "slot_steps" in value:
                yield value


def trace(steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the trace of a run; times are microseconds since its first step."""
    steps = list(steps)
    zero = steps[0]["t"] if steps else 0.0

    def micro(moment: float) -> float:
        return round((moment - zero) * 1e6, 3)

    events: list[dict[str, Any]] = []
    open_: dict[int, dict[str, Any]] = {}
    slots = set()
    for step in steps:
        begin, end = micro(step["t"]), micro(step["t"] + step["seconds"])
        kinds = step["slot_steps"]
        events.append(_slice(f"step {step['n']}", STEPS_THREAD, begin, end, {
            "queue": step["queue"], "policy": step["policy"], "joined": step["joined"],
            "left": step["left"], **kinds,
        }))  # fmt: skip
        events += _counters(step, begin)
        taken = set()
        for member in step["members"]:
            slot = member["slot"]
            slots.add(slot)
            taken.add(slot)
            run = open_.get(slot)
            same = run is not None and (run["id"], run["phase"]) == (member["id"], member["phase"])
            if run is None or not same or member["id"] in step["joined"]:
                _close(events, open_, slot)
                run = open_[slot] = {
                    "id": member["id"], "phase": member["phase"], "begin": begin, "first": step["n"],
                    "tokens": 0,
                }  # fmt: skip
            run |= {"end": end, "last": step["n"], "computed": member["computed"]}
            run["tokens"] += member["tokens"]
        for slot in set(open_) - taken:
            _close(events, open_, slot)
    for slot in list(open_):
        _close(events, open_, slot)
    policy = steps[-1]["policy"] if steps else "nothing"
    names = [_name("process_name", 0, f"effective-batching: {policy}"), _name("thread_name", STEPS_THREAD, "steps")]
    names += [_name("thread_name", FIRST_SLOT + slot, f"slot {slot}") for slot in sorted(slots)]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _counters(step: dict[str, Any], begin: float) -> Iterator[dict[str, Any]]:
    batch = sum(m["phase"] != "idle" for m in step["members"])
    pages = step["pages"]["used"]
    for name, values in (
        ("queue", {"waiting": step["queue"]}),
        ("batch", {"rows": batch}),
        ("KV pages", {"used": pages}),
    ):
        yield {"ph": "C", "pid": PROCESS, "name": name, "ts": begin, "args": values}


def _close(events: list[dict[str, Any]], open_: dict[int, dict[str, Any]], slot: int) -> None:
    run = open_.pop(slot, None)
    if run is None:
        return
    args = {"id": run["id"], "iterations": [run["first"], run["last"]], "tokens": run["tokens"],
            "computed": run["computed"]}  # fmt: skip
    name = f"{run['id'][:8]} {run['phase']}"
    event = _slice(name, FIRST_SLOT + slot, run["begin"], run["end"], args)
    events.append(event | {"cat": run["phase"], "cname": COLORS.get(run["phase"], "grey")})


def _slice(name: str, thread: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": PROCESS, "tid": thread, "name": name, "ts": begin,
            "dur": round(end - begin, 3), "cat": "step", "args": args}  # fmt: skip


def _name(kind: str, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": kind, "args": {"name": text}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("trace", type=Path)
    args = parser.parse_args()
    try:
        with args.recording.open(encoding="utf-8") as lines:
            result = trace(records(lines))
    except (OSError, ValueError) as error:
        print(f"error: {args.recording}: {error}. Use a recording with a JSON object on each line", file=sys.stderr)
        raise SystemExit(2) from None
    args.trace.write_text(json.dumps(result, separators=(",", ":")), "utf-8")
    print(f"{len(result['traceEvents']):,} events in {args.trace}", file=sys.stderr)


if __name__ == "__main__":
    main()
