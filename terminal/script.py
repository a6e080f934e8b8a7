"""The command `eb` that pip installs with `pip install -e .`: this project's own `eb`, with the Python that pip installed into."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Replace this process by the script."""
    script = Path(__file__).resolve().parents[1] / "eb"
    os.execve(script, [str(script), *sys.argv[1:]], os.environ | {"EB_PYTHON": sys.executable})
