"""`./eb vllm report RECORD`: the share of steps in which vLLM did what was planned, and the first step in which it did not."""

from __future__ import annotations

import json
from pathlib import Path


def main(argv: list[str]) -> None:
    """Print a line for each record; exit with 1 if one cannot be read."""
    for path in argv:
        try:
            lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: {path}: {error}. Name a file that ./eb vllm serve --record wrote") from None
        steps = [line for line in lines if "members" in line]
        other = [line for line in steps if "planned" in line]
        joins = sum(len(line["joined"]) for line in steps)
        text = f"{path}: {len(steps):,} steps, {joins:,} joins, {1 - len(other) / max(1, len(steps)):.2%} of the steps as planned"
        if other:
            did = {m["id"]: m["tokens"] for m in other[0]["members"] if m["tokens"]}
            text += f"; first in step {other[0]['n']}: planned {other[0]['planned']}, computed {did}"
        print(text)  # noqa: T201
