"""Data of other projects that tests compare with: the small part that is committed (NOTICE says whose it is), and more of
it in the folder that EB_TEST_DATA names. Tests marked `data` need that folder and are left out without it.
"""

from __future__ import annotations

import atexit
import lzma
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

COMMITTED = Path(__file__).resolve().parents[1] / "data"
MORE = Path(os.environ["EB_TEST_DATA"]) if os.environ.get("EB_TEST_DATA") else None


def more_data(*values: str) -> list[Any]:
    """Return points of a parametrized test that need the folder, and take long."""
    return [pytest.param(value, marks=[pytest.mark.full, pytest.mark.data]) for value in values]


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="eb-test-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def path_of(name: str) -> Path:
    """Return the file of this name, unpacked if it is committed, otherwise in the folder of EB_TEST_DATA."""
    packed = COMMITTED / f"{name}.xz"
    if packed.is_file():
        path = _folder() / packed.stem
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        return path
    committed = COMMITTED / name
    if committed.is_file() or MORE is None:
        return committed
    return MORE / name
