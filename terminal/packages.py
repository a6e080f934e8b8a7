"""Ends the program that imports it, with one line, where this Python lacks packages that every program here needs."""

import sys
from importlib.util import find_spec
from pathlib import Path

if missing := [name for name in ("aiohttp", "click", "dotenv", "numpy", "requests", "rich") if find_spec(name) is None]:
    root = Path(__file__).resolve().parent.parent
    own = root / ".venv/bin/python"
    file = root / ("requirements.txt" if Path(sys.argv[0]).name == "app.py" else "client/requirements.txt")
    remedy = f"{'Use ' + str(own) + ', or run' if own.exists() else 'Run'} '{sys.executable} -m pip install -r {file}'"
    print(f"error: {sys.executable} lacks {', '.join(missing)}. {remedy}", file=sys.stderr)
    sys.exit(2)
