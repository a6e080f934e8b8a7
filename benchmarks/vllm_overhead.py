"""What the adapter costs a step of vLLM's scheduler: run `PYTHONPATH=. VLLM_PYTHON benchmarks/vllm_overhead.py` on an idle machine.

Milliseconds of schedule and update for 1, 16 and 256 decoding rows, of vLLM alone and with each policy; medians of steps.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from engines.mocked_vllm import Mocked
from engines.vllm import PolicyScheduler

STEPS = 200


def step_ms(cls: type[Any], rows: int) -> float:
    """Return the milliseconds of a step that decodes this number of rows."""
    mocked = Mocked(cls, slots=rows, tokens=8192, blocks=rows * 32)
    for i in range(rows):
        mocked.add(f"r{i}", [i, 1, 2, 3], STEPS + 20)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        mocked.plan()
        mocked.compute()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[10:])


if __name__ == "__main__":
    for rows in (1, 16, 256):
        alone = step_ms(AsyncScheduler, rows)
        print(f"{rows:4} rows: vLLM alone {alone:.3f} ms", end="")
        for policy in ("dynamic", "dynamic+vtc"):
            os.environ["EB_VLLM"] = json.dumps({"policy": policy})
            print(f", {policy} +{step_ms(PolicyScheduler, rows) - alone:.3f} ms", end="")
        print(f" (goal: {0.1 + rows / 1000:.3f} ms)", flush=True)
