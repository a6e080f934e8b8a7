"""python -m client.report FOLDER: draw the page of a comparison."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from terminal.console import FINE, emit
from terminal.options import UsageError

from ..display import guarded
from . import page


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of a comparison again."""
    arguments = sys.argv[1:] if argv is None else argv

    def command(console: Console) -> int:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise UsageError("exactly one folder of a comparison is required. Use client.report results/NAME")
        try:
            emit(str(page.write(Path(arguments[0]))))
        except ValueError as error:
            raise UsageError(str(error)) from error
        return FINE

    return guarded(command)


if __name__ == "__main__":
    sys.exit(main())
