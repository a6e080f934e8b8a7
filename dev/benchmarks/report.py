"""What the benchmarks share: their command line, and their result as JSON on stdout and in a file."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from terminal.console import table_of


class Help(argparse.HelpFormatter):
    """A help whose text is wrapped, but not the commands in it, and in which options show their defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [part if part.startswith(" ") else textwrap.fill(part, width) for part in text.strip().split("\n\n")]
        return "\n\n".join(parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, False, [], argparse.SUPPRESS) or text.endswith(")"):
            return text
        shown = ",".join(map(str, default)) if isinstance(default, list) else "%(default)s"
        return f"{text} (default: {shown})".strip()


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, with --json."""
    result = argparse.ArgumentParser(prog=f"python -m dev.benchmarks.{name}", description=text, formatter_class=Help)
    result.add_argument("--json", type=Path, help="also write the result to this file")
    return result


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean of repeated measurements (Student's), at least two of them."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.95)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server under test."""
    parser.add_argument("--policy", default="dynamic", help="policy of the server")
    parser.add_argument("--model", default="bard", help="model of the server")
    parser.add_argument("--compute-threads", type=int, default=0, help="compute threads; 0: one per core")


def add_model(parser: argparse.ArgumentParser, *dtypes: str) -> None:
    """Add the options of a model that is loaded in this process."""
    add = parser.add_argument
    add("--model", default="gpt2-medium", help="as the server's --model")
    add("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights of the model's shape")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", *dtypes), help="number format")
    add("--quantize", default="none", choices=("none", "as-stored", "int8", "int4"), help="format of the weights")
    add("--kv-dtype", default="auto", choices=("auto", "int8"), help="format of keys and values")


def show(title: str | None, heads: Iterable[str], rows: Iterable[Iterable[str]], **more: Any) -> None:
    """Print a table for a person, as `terminal.console.table_of` draws it."""
    Console(stderr=True).print(table_of(title, heads, rows, **more))


def keep(file: Path | None, result: dict[str, Any]) -> None:
    """Write what is known so far to the file of --json, which `finish` writes again."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")


def finish(name: str, result: dict[str, Any], file: Path | None) -> None:
    """Print a result with the machine and the command, and write it to the file."""
    from dev.benchmarks import machine  # it loads torch, which not every benchmark needs

    command = " ".join(["python", "-m", f"dev.benchmarks.{name}", *sys.argv[1:]])
    result = {"benchmark": name, **result, "machine": machine.describe(), "command": command}
    keep(file, result)
    print(json.dumps(result))
