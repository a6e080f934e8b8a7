"""What the benchmarks share: their command line, and their result as JSON on stdout and in a file."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, with --json."""
    result = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=Path, help="also write the result to this file")
    return result


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean of repeated measurements (Student's), at least two of them."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.95)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def add_server(parser: argparse.ArgumentParser, threads: int = 0) -> None:
    """Add the options of the server under test."""
    parser.add_argument("--policy", default="dynamic")
    parser.add_argument("--model", default="bard")
    parser.add_argument("--compute-threads", type=int, default=threads)


def add_model(parser: argparse.ArgumentParser, *dtypes: str) -> None:
    """Add the options of a model that is loaded in this process."""
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", *dtypes))
    parser.add_argument("--quantize", default="none", choices=("none", "as-stored", "int8", "int4"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "int8"))


def keep(file: Path | None, result: dict[str, Any]) -> None:
    """Write what is known so far to the file of --json, which `finish` writes again."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")


def finish(name: str, result: dict[str, Any], file: Path | None) -> None:
    """Print a result with the machine and the command, and write it to the file."""
    command = " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    result = {"benchmark": name, **result, "machine": machine.describe(), "command": command}
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
