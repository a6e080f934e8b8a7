"""Gauges of a card: those that NVML has of it, and none without NVML."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from app import create_app
from config import Config
from observe import card
from tests.support.fakes import fake_engine


class NVMLError(Exception):
    pass


def not_supported(*_: object) -> None:
    raise NVMLError("Not Supported")


def nvml(uuid: str = "GPU-1") -> SimpleNamespace:
    known = {"GPU-1": "card"}
    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=known.__getitem__,
        nvmlDeviceGetUtilizationRates=not_supported, nvmlDeviceGetPowerUsage=lambda card: 350_500,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=3 << 30, total=80 << 30),
        nvmlDeviceGetTemperature=lambda card, sensor: 41, nvmlDeviceGetClockInfo=lambda card, kind: 1980,
    )  # fmt: skip


def test_a_card_has_the_gauges_that_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    values = card.reader("GPU-1")()
    assert values == {
        "eb_gpu_memory_used_bytes": 3 << 30, "eb_gpu_memory_bytes": 80 << 30, "eb_gpu_power_watts": 350.5,
        "eb_gpu_temperature_celsius": 41, "eb_gpu_clock_hertz": 1.98e9,
    }  # fmt: skip
    assert card.reader("MIG-7")() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert card.reader("GPU-1")() == {}


def test_metrics_and_stats_have_the_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    engine = dataclasses.replace(fake_engine(), facts={"gauges": card.reader("GPU-1")})
    client = create_app(Config(), engine).test_client()
    text, stats = client.get("/metrics").get_data(as_text=True), client.get("/stats").get_json()
    engine.manager.stop()
    assert "eb_gpu_power_watts 350.5" in text
    assert "eb_gpu_utilization_ratio" not in text
    assert stats["engine"]["gpu"]["eb_gpu_temperature_celsius"] == 41
