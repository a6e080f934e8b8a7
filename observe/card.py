"""Gauges of an NVIDIA card, which NVML reads where `nvidia-ml-py` is installed (the extra `gpu`).

This module must not know Prometheus, HTTP or tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

# 0 is NVML_TEMPERATURE_GPU, 1 is NVML_CLOCK_SM.
GAUGES: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "eb_gpu_utilization_ratio": ("Share of time in which a kernel runs on the GPU.", lambda nvml, card: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100),
    "eb_gpu_memory_used_bytes": ("Memory of the GPU in use, by all programs.", lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).used),
    "eb_gpu_memory_bytes": ("Memory of the GPU.", lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).total),
    "eb_gpu_power_watts": ("Power that the GPU draws.", lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1e3),
    "eb_gpu_temperature_celsius": ("Temperature of the GPU.", lambda nvml, card: nvml.nvmlDeviceGetTemperature(card, 0)),
    "eb_gpu_clock_hertz": ("Clock of the GPU's processors.", lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, 1) * 1e6),
}  # fmt: skip


def reader(uuid: str) -> Callable[[], dict[str, float]]:
    """Return a function that reads the gauges of the card with this UUID: those that it has, and none without NVML."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # an extra that is not installed, or a part of a card
        return dict

    def read() -> dict[str, float]:
        values: dict[str, float] = {}
        for name, (_, value) in GAUGES.items():
            with contextlib.suppress(nvml.NVMLError):
                values[name] = value(nvml, card)
        return values

    return read
