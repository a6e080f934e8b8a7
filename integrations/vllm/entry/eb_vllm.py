"""The only name that is put on vLLM's path; the rooms of this project that it may import are found from here, and no others."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

ROOMS = ("integrations", "policies", "scheduling", "serving")
ROOT = str(Path(__file__).resolve().parents[3])
HOMES = {"PolicyScheduler": "integrations.vllm.scheduler", "Middleware": "integrations.vllm.middleware"}


class Rooms:
    """Finds the rooms, whatever else is on the path."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT]) if name in ROOMS else None


sys.meta_path.insert(0, Rooms)


def __getattr__(name: str) -> Any:
    """Import what vLLM asks for in the process that needs it: the API's has no scheduler."""
    if name not in HOMES:
        raise AttributeError(name)
    return getattr(import_module(HOMES[name]), name)
