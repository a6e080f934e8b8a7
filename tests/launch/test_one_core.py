"""Python's threads share one processor, threads that compute in C have all, and another processor is chosen if need be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from launch.one_core import OneCore, choose
from tests.support import ROOT

SEVERAL = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1
several = pytest.mark.skipif(not SEVERAL, reason="one processor, or a system that does not let a process choose")
PLACED = """
import ctypes, json, os, threading
from launch.one_core import OneCore

class Still(OneCore):
    def _read(self):
        return 0.0, 0.0, {}

libc, native = ctypes.CDLL(None), ctypes.c_ulong()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # which the thread in C inherits
libc.pthread_create(ctypes.byref(native), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
os.sched_setaffinity(0, ALL)
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
known = {os.getpid(): "main", thread.native_id: "handler"}
core = Still()
core.place()
found = {known.get(int(n), "native"): sorted(os.sched_getaffinity(int(n))) for n in os.listdir("/proc/self/task")}
with core.elsewhere():
    found["elsewhere"] = sorted(os.sched_getaffinity(0))
found["back"], found["core"] = sorted(os.sched_getaffinity(0)), [core.core]
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("idle", "own", "chosen"),
    [
        ({0: 0.0, 1: 1.0}, 1.0, 0),  # all of ours is our own work
        ({0: 0.0, 1: 1.0}, 0.5, 1),  # others have half of it, and the other one is idle
        ({0: 0.0, 1: 0.2}, 0.5, 0),  # where hardly more is left
        ({0: 0.5, 1: 1.0}, 0.4, 0),  # others take little
        ({0: 0.0, 1: 0.4, 2: 0.9}, 0.2, 2),
    ],
)
def test_another_processor_is_chosen_if_others_need_this_one_and_leave_that(
    idle: dict[int, float], own: float, chosen: int
) -> None:
    assert choose(0, idle, own) == chosen


@several
def test_python_threads_get_one_processor_and_others_all() -> None:
    every = sorted(os.sched_getaffinity(0))
    code = PLACED.replace("ALL", str(set(every)))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["core"]) == 1
    assert found["main"] == found["handler"] == found["back"] == found["core"]
    assert found["native"] == found["elsewhere"] == every


@several
def test_a_thread_goes_on_where_a_processor_has_been_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    core, entered = OneCore(), False

    def refuse(thread: int, allowed: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with core.elsewhere():
        entered = True
    core.place()
    assert entered
    with pytest.raises(OSError, match="Invalid argument"):
        OneCore()
