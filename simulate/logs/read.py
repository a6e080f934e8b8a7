"""Read a log of requests, whatever its format, which its content tells."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from client.send import ask
from client.send.target import Target
from simulate.logs.checks import checked
from simulate.logs.formats import FORMATS, PROBE, WHAT_IF
from simulate.logs.log import Log

MOST_SERVED = 400  # requests that a server tells
ANSWER_SECONDS = 60.0
FILES = ("requests.csv", "requests.jsonl", "profile_export.jsonl", "benchmarks.json")  # of a folder


def read(path: Path) -> Log:
    """Read a file or folder; ValueError with the remedy if it is none of the formats, damaged, or too little."""
    try:
        file = _file(path)
        rows = _objects(file.read_text("utf-8-sig").strip())
        format = next((format for format in FORMATS if format.keys <= rows[0].keys()), None)
        if "requests" in rows[0] and "misfit" in rows[0]:
            raise ValueError(f"it is a cost file that fit wrote. Use the log, or ./eb advise {path}")
        if format is None:
            examples = "".join(f"\n  {format.made_by}" for format in FORMATS)
            raise ValueError(f"its format is unknown. Use a file of one of these:{examples}")
        return checked(*format.read(rows, file), designed=format.made_by == PROBE)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read a log from {str(path)!r}: it is damaged ({what}). Record it again") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"cannot read a log from {str(path)!r}: it is neither JSON nor CSV in UTF-8. Use the file of a tool"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read a log from {str(path)!r}: {error.strerror}. Check the path") from error
    except ValueError as error:
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


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON, of lines of JSON, or of CSV."""
    lines = text.splitlines()
    try:
        rows: Any = json.loads(text) if text[:1] in ("{", "[") else list(csv.DictReader(lines))
    except (json.JSONDecodeError, csv.Error):
        rows = [_object(number, line) for number, line in enumerate(lines, 1) if line]
    found: list[dict[str, Any]] = rows if isinstance(rows, list) else [rows]
    if not found or not all(isinstance(row, dict) for row in found):
        raise ValueError("it has no requests. Use a file with an object for each")
    return found


def _object(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise ValueError(
            f"its line {number} is no JSON. Remove the line if it is cut, or record the log again"
        ) from None


def served(url: str, api_key: str | None) -> Log | None:
    """Return what our own server, or a queue of ours, at a URL has served lately; None if another one answers there."""
    body = {"policies": [], "count": MOST_SERVED}
    reply = Target(url, api_key=api_key).ask("POST", "/what-if", body, ANSWER_SECONDS)
    if reply.status_code != 200:
        return None
    format = next(format for format in FORMATS if format.made_by == WHAT_IF)
    try:
        requests, server, notes = format.read([reply.json()], Path())
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # a page, or another server's answer
    return checked(requests, {**server, **ask.facts(url, api_key)}, notes)
