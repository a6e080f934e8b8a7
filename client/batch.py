"""Send the requests of a file in OpenAI's batch format to a server, and write their answers to another file.

Any server with OpenAI's routes will do. Each line is answered once: after a kill, a full disk or the end of the server, the
same command sends what has no answer yet. What fails is written to OUTPUT.errors.jsonl.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from batch_files.lines import ForeignFile, Pending
from batch_files.output import InUse, LineFile
from terminal import console as out
from terminal.console import EXIT_CODES, FINE, INTERRUPTED, SOME_FAILED, UNREACHABLE, say
from terminal.options import Argument, Command, Number, Option, UsageError, Values
from terminal.progress import Reporter, State, remaining

from . import display, flags
from .send.batch_load import BatchRun, NoProgress
from .send.target import Target, fetch

COMMAND = Command(
    "./eb batch", (__doc__ or "").partition("\n\nAny")[0],
    {
        "arguments": [Argument("input", "file with a request per line"), Argument("output", "file for the answers"), flags.URL],
        "options": [
            flags.PORT,
            flags.API_KEY,
            Option("--concurrency", "maximum number of requests in flight", Number(1, 4096), default=64),
            flags.TIMEOUT,
            Option("--patience", "end when nothing is answered for S seconds", Number(0, kind=float, name="S"), default=600.0),
        ],
    },
    {"exit codes": EXIT_CODES},
)  # fmt: skip


@display.guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Send a batch; return the exit code."""
    args = flags.parse(COMMAND, argv, environ)
    target = Target(flags.at_port(args.url, args.port), args.timeout, api_key=args.api_key)
    with _input(Path(args.input)) as lines:
        return _send(console, args, target, lines)


def _input(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
        if not file.seekable():
            raise UsageError(f"{str(path)!r} is not a file that can be read twice. Save the requests to a file")
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}. Use another input file") from error
    return file


def _output(path: Path) -> LineFile:
    try:
        return LineFile(path)
    except InUse:
        raise UsageError(f"another process writes {str(path)!r}. Wait until it ends, or use another output") from None
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}. Use another output file") from error


def _send(console: Console, args: Values, target: Target, lines: BinaryIO) -> int:
    errors = Path(f"{args.output.removesuffix('.jsonl')}.errors.jsonl")
    if any(path.exists() and os.path.samefile(args.input, path) for path in (Path(args.output), errors)):
        raise UsageError(f"{args.output!r} is the input. Use another output file")
    with _output(Path(args.output)) as answered, _output(errors) as failed:
        pending = _pending(lines, (answered, failed))
        if pending.answered:
            say(console, f"{pending.answered:,} of {pending.total:,} lines have an answer; sending the others")
        fetch(target, "/v1/models")  # raises if nothing listens there
        run = BatchRun(target, lambda line, is_error: (failed if is_error else answered).append(line),
                       min(args.concurrency, max(1, pending.total)), args.patience)  # fmt: skip
        code, problem, began = FINE, "", time.monotonic()
        with Reporter(console, lambda: _state(run, pending, began), stays=True):
            try:
                asyncio.run(run.send(iter(pending)))
            except KeyboardInterrupt:
                code, problem = INTERRUPTED, "interrupted"
            except NoProgress as error:
                code, problem = UNREACHABLE, f"no answer from {target.url} for {args.patience:g} s: {error}"
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                code, problem = SOME_FAILED, "the disk is full" if full else f"cannot write: {error.strerror}"
        return _end(console, args, run, pending, failed, code, problem)


def _pending(lines: BinaryIO, files: tuple[LineFile, LineFile]) -> Pending:
    readers = [file.reader() for file in files]
    try:
        return Pending(lines, readers)
    except ForeignFile as error:
        name, number = error.args
        raise UsageError(f"line {number} of {name!r} is not an answer to a batch. Use another output file") from None
    finally:
        for reader in readers:
            reader.close()


def _state(run: BatchRun, pending: Pending, began: float) -> State:
    """Return the progress, in a line that fits 80 columns with its bar."""
    new = run.done + run.failed
    ended, seconds = pending.answered + new, max(time.monotonic() - began, 1e-9)
    left = remaining(new, pending.total - pending.answered, seconds) if new else "-"
    text = f"{ended:,}/{pending.total:,}  failed {run.failed:,}  {run.tokens / seconds:,.0f} tok/s  ETA {left}"
    return State(ended, pending.total, text)


def _end(
    console: Console, args: Values, run: BatchRun, pending: Pending, failed: LineFile, code: int, problem: str
) -> int:
    rest = pending.total - pending.answered - run.done - run.failed
    if problem:
        say(console, f"error: {problem}. {rest:,} lines have no answer. Run the same command again to send them")
    failures = failed.lines()
    text = f"{pending.total - rest - failures:,} lines answered in {args.output}"
    say(console, text + (f", {failures:,} failed: {failed.path}" if failures else ""))
    if not failures:
        failed.path.unlink(missing_ok=True)
    return code or (SOME_FAILED if failures else FINE)


if __name__ == "__main__":
    out.leave(main())
