"""What the client shows of a run, and how its commands end when the server cannot be reached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from rich.console import Console

from terminal.console import INTERRUPTED, UNREACHABLE, USAGE, say
from terminal.options import UsageError
from terminal.progress import Reporter, State, duration

from .send.load import LoadRun
from .send.target import ServerUnreachable


def guarded(command: Callable[[Console, list[str], Mapping[str, str]], int]) -> Callable[..., int]:
    """Return the `main` of a command, by default with the words and the environment of this process.

    It prints an error as one line on stderr and returns the exit code.
    """

    @wraps(command)
    def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
        console = Console(stderr=True)
        try:
            return command(
                console, [*(sys.argv[1:] if argv is None else argv)], os.environ if environ is None else environ
            )
        except UsageError as error:
            say(console, f"error: {error}")
            return USAGE
        except ServerUnreachable as error:
            say(console, f"error: {error}")
            return UNREACHABLE
        except KeyboardInterrupt:
            return INTERRUPTED

    return main


class Display(Reporter):
    """Shows the progress of a run."""

    def __init__(self, run: LoadRun, console: Console, last_send: float) -> None:
        super().__init__(console, self.state, after=0.0, stays=True)
        self._run = run
        self._last_send = last_send

    def state(self) -> State:
        """Return how many requests ended, and the progress as one line."""
        counts = self._run.counts()
        ended = counts.done + counts.failed
        left = max(0.0, self._last_send - counts.seconds)
        if ended:
            left = max(left, (counts.total - ended) * counts.seconds / ended)
        eta = duration(left) if ended or left else "-"
        text = (
            f"done {counts.done}/{counts.total}  running {counts.running}  failed {counts.failed}  "
            f"{counts.tokens / max(counts.seconds, 1e-9):,.0f} tokens/s  ETA {eta}"
        )
        return State(ended, counts.total, text)
