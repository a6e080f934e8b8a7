"""Read a log of requests, whatever its format, which its content tells."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from simulate.logs.checks import checked
from simulate.logs.formats import FORMATS, PROBE
from simulate.logs.log import Log

MOST_BYTES = 1 << 28
FILES = ("requests.csv", "requests.jsonl", "profile_export.jsonl", "benchmarks.json")  # of a folder


def read(path: Path) -> Log:
    """Read a file or folder; ValueError with the remedy if it is none of the formats, damaged, or too little."""
    try:
        file = _file(path)
        rows = _objects(file)
        format = next((format for format in FORMATS if format.keys <= rows[0].keys()), None)
        if format is None:
            examples = "".join(f"\n  {format.made_by}" for format in FORMATS)
            raise ValueError(f"its format is unknown. Use a file of one of these:{examples}")
        try:
            return checked(*format.read(rows, file), designed=format.made_by == PROBE)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it is damaged for {format.made_by!r} ({type(error).__name__}: {error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read a log from {str(path)!r}: it is not text ({error}). Unpack it first") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read a log from {str(path)!r}: {error}") from error


def _file(path: Path) -> Path:
    """Return the file of a folder; of a comparison, that of its run."""
    folder = path.parent if path.name == FILES[0] else path
    if len(runs := sorted(folder.glob("runs/*.json"))) > 1:
        raise ValueError(f"it has {len(runs)} runs, but a log is of one. Use {str(runs[0])!r} or another one beside it")
    files = runs or [path / name for name in FILES if (path / name).is_file()]
    if not files and path.is_dir():
        raise ValueError(f"it is a folder without a log. Use a file, or a folder with one of {', '.join(FILES)}")
    return files[0] if files else path


def _objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON, of lines of JSON, or of CSV."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB. Copy a part of it, such as 10,000 requests")
    text = data.decode("utf-8-sig").strip()
    try:
        rows: Any = json.loads(text) if text[:1] in ("{", "[") else list(csv.DictReader(text.splitlines()))
    except ValueError:
        rows = [_object(line, n) for n, line in enumerate(text.splitlines(), 1) if line]
    except csv.Error as error:
        raise ValueError(f"it is not text with commas ({error}). Use CSV with a header, or JSON") from error
    found: list[dict[str, Any]] = rows if isinstance(rows, list) else [rows]
    if not found or not all(isinstance(row, dict) for row in found):
        raise ValueError("it has no requests. Use a file with an object for each")
    return found


def _object(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON ({error}). Delete it if the file was cut there") from error
