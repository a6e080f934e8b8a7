"""python -m client.report FOLDER: draw the page of a comparison."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from terminal.console import FINE, emit
from terminal.options import UsageError

from ..display import guarded
from . import page


@guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Write the page of a comparison again."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UsageError("exactly one folder of a comparison is required. Use client.report results/NAME")
    try:
        emit(str(page.write(Path(argv[0]))))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return FINE


if __name__ == "__main__":
    sys.exit(main())
