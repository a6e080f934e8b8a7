"""The process that simulates for a server, at the lowest priority, so that the loop keeps the GIL and the processor.

It must not know what is simulated.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class SimulatorProcess:
    """`python -m MODULE`, which starts with the first question and answers each with one line of JSON."""

    def __init__(self, module: str, *, timeout: float, command: Sequence[str] = ()) -> None:
        self._command = command or (sys.executable, "-m", module)
        self._timeout = timeout
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, lines: Iterable[str]) -> bytes:
        """Send these lines and return the answer's line; raise OSError (TimeoutError) or RuntimeError if there is none."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        for line in lines:
            process.stdin.write(line.encode())
        process.stdin.flush()
        if not select.select([process.stdout], [], [], self._timeout)[0]:
            raise TimeoutError(f"timed out after {self._timeout:g} s")
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise RuntimeError(f"its process exited with status {process.wait(5)}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # One compute thread is enough. Its stderr is not needed, because its answers contain errors.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            self._command, cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the server's terminal must not reach it
        )  # fmt: skip

    def end(self) -> None:
        """End the process; the next question starts another one."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    pipe and pipe.close()


def in_pieces(name: str, rows: Iterable[Any], at_once: int) -> Iterator[str]:
    """Yield lines with a few rows each, because encoding many of them at once would keep the GIL from the loop."""
    remaining = iter(rows)
    while piece := list(islice(remaining, at_once)):
        yield json.dumps({name: piece}) + "\n"
