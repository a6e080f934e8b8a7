"""The first cases of the law checker on a user's own policy, before the server starts with it.

A hook with the wrong arguments would end the server at its first request, and a policy that admits none would let all
requests wait, so this takes a moment at the start and says what `simulate check` says. The checker runs in a process of
its own, which is started by name: the server imports nothing of the laboratory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import config
import policies
from launch import banner

SECONDS = 0.6  # for all cases
STARTS = 1.0  # seconds more for the process, after which it is ended


def check(name: str, options: Mapping[str, object] | None = None) -> None:
    """Warn of what is wrong with a policy, unless it is one of this project or nothing is found in time."""
    if not _is_own(name):
        return
    words = [sys.executable, "-m", "simulate.laws.first", policies.absolute(name), str(SECONDS), json.dumps(options)]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + STARTS, cwd=config.ROOT)
    except subprocess.TimeoutExpired:
        return
    if result.stdout:
        banner.warn(f"{result.stdout}. The server starts all the same. Test it with ./eb simulate check {name}")


def _is_own(name: str) -> bool:
    try:
        policies.check_name(name, own=False)
    except ValueError:
        return True
    return False
