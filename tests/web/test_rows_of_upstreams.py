"""The page's model of several engines on one queue: a step is of one, and the rows of the others stay."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from config import ROOT

NODE = shutil.which("node")
SHOW = """const EB = require(process.argv[1]), model = new EB.Model();
for (const record of JSON.parse(process.argv[2])) model.add(record);
const kinds = (column) => [...column.who].map((who, slot) => [who, EB.NAMES[column.kind(slot)], column.has(slot, EB.OTHER)]);
console.log(JSON.stringify({ columns: model.columns.map(kinds), fill: model.tiles(model.columns.length - 1).fill }));"""


def step(n: int, first: int, phase: str, *, left: bool = False) -> dict[str, Any]:
    id = f"r{first}"
    member = {"id": id, "slot": first, "phase": phase, "tokens": 1, "computed": n, "total": 9}
    return {
        "n": n, "t": n / 10, "seconds": 0.1, "rows": [first, first + 1], "policy": "dynamic", "queue": 0, "members": [member],
        "joined": [id] if phase == "prefill" else [], "left": [{"id": id, "reason": "length"}] if left else [],
        "slot_steps": {"useful": 1, "padding": 0, "held": 0, "idle": 0, "recomputed": 0, "rejected": 0},
    }  # fmt: skip


@pytest.mark.skipif(NODE is None, reason="no node here to run the page's model")
def test_the_rows_of_another_upstream_stay_until_it_steps_or_they_leave() -> None:
    records = [step(1, 0, "prefill"), step(2, 1, "prefill"), step(3, 0, "decode", left=True), step(4, 1, "decode")]
    command = [str(NODE), "-e", SHOW, str(ROOT / "web" / "model.js"), json.dumps(records)]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert shown["columns"][1:] == [
        [[1, "prefill", True], [2, "prefill", False]],
        [[1, "decode", False], [2, "prefill", True]],
        [[0, "idle", False], [2, "decode", False]],
    ]
    assert shown["fill"] == 1
