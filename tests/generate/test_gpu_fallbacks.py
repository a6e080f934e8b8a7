"""What a card lacks or a kernel breaks costs speed, or ends the process that cannot compute any more; never a text."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from generate import machine
from generate.gpu import card, choose
from generate.gpu.graphs import GraphReplayer, Replayer
from generate.gpu.runner import GpuRunner
from tests.support.generate import SHAPES, make_model, ragged, run

CONFIG = SHAPES["heads of 64"]
CUDA = torch.device("cuda")
GIB = 1 << 30
POISON = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for a card: the values may be changed."""
    facts: dict[str, Any] = {
        "is_available": True, "synchronize": None, "device_count": 1, "get_device_name": "NVIDIA X", "init": None,
        "get_device_capability": (9, 0), "mem_get_info": (79 * GIB, 80 * GIB), "is_bf16_supported": True,
    }  # fmt: skip

    def asked(name: str) -> Any:
        def answer(*_: object, **__: object) -> Any:
            if isinstance(facts[name], Exception):
                raise facts[name]
            return facts[name]

        return answer

    for name in facts:
        monkeypatch.setattr(torch.cuda, name, asked(name))
    monkeypatch.delenv("EB_KERNELS", raising=False)
    return facts


def failing(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_a_part_that_fails_alone_or_is_wrong_is_replaced_with_one_warning(
    gpu: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "GraphReplayer", Replayer)
    assert choose.agreed(lambda: ("fast", 1e-6, ()), torch.float32, "x", CUDA) == "fast"
    for part, reason in (
        (failing(RuntimeError("PassManager::run failed")), ", which is much slower: PassManager::run failed"),
        (lambda: ("fast", 0.5, ()), ": the fast kernel is off by 0.5"),
        (lambda: ("fast", math.nan, ()), ": the fast kernel is off by nan"),
        (lambda: ("fast", 0.0, [failing(RuntimeError("no capture"))]), ", which is much slower: no capture"),
    ):
        caplog.clear()
        assert choose.agreed(part, torch.float32, "attention", CUDA) is None
        messages = [record.getMessage() for record in caplog.records]
        assert messages == [f"attention falls back to plain PyTorch{reason}"]


@pytest.mark.parametrize(("fast", "plain", "serves"), [([9, 1, 9], [2, 9, 9], True), ([9, 3, 9], [2, 9, 9], False)])
def test_a_part_that_loses_on_time_stays_plain_without_a_warning(
    fast: list[int], plain: list[int], serves: bool, gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The shortest time counts, by a clock that the calls move on."""
    now = 0

    def taking(times: list[int]) -> Any:
        each = iter(times)

        def call() -> torch.Tensor:
            nonlocal now
            now += next(each)
            return torch.zeros(1)

        return call

    def repeat(call: Any, number: int, repeat: int) -> list[int]:
        times = [now, *((call(), now)[1] for _ in range(repeat))]
        return [after - before for before, after in itertools.pairwise(times)]

    monkeypatch.setattr(choose, "GraphReplayer", Replayer)
    monkeypatch.setattr(choose, "ROUNDS", 3)
    monkeypatch.setattr(choose.timeit, "repeat", repeat)
    with caplog.at_level("INFO", choose.__name__):
        found = choose.agreed(lambda: ("fast", 0.0, [taking(fast), taking(plain)]), torch.float32, "drawing", CUDA)
    assert found == ("fast" if serves else None)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert serves or "drawing stays plain: the fast kernel takes 1.50 times as long" in record.getMessage()


@pytest.mark.parametrize("where", ["a part", "the recording"])
@pytest.mark.parametrize("cause", ["memory", "poison"])
def test_what_plain_pytorch_cannot_survive_is_raised(
    gpu: dict[str, Any], caplog: pytest.LogCaptureFixture, where: str, cause: str
) -> None:
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    if cause == "poison":
        gpu["synchronize"], error = RuntimeError(POISON), RuntimeError("Triton Error [CUDA]: misaligned address")
    runner = GpuRunner(make_model(CONFIG), 9, 64, capacity=2)
    runner.decoder.replayer.record = failing(error)  # type: ignore[method-assign]
    steps = {"a part": lambda: choose.agreed(failing(error), torch.float16, "x", CUDA), "the recording": runner.warm_up}
    with pytest.raises(RuntimeError, match="out of memory" if cause == "memory" else "illegal memory access"):
        steps[where]()
    assert caplog.records == []


def test_a_recording_that_breaks_off_costs_only_speed(gpu: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Half of the graphs are there when the recording fails; none of them is replayed."""
    runner = GpuRunner(make_model(CONFIG), 120, 64, capacity=8)
    plain = runner.decoder.replayer
    graphs = GraphReplayer(plain.step, plain.buckets, *plain.choices)
    graphs.record = failing(RuntimeError("operation failed due to a previous error during capture"))  # type: ignore[method-assign]
    graphs.run = failing(AssertionError("replayed"))  # type: ignore[method-assign]
    runner.decoder.replayer = graphs
    assert runner.warm_up()
    assert len(caplog.records) == 1
    assert runner.kernels == {
        "decode": "torch", "prompts": "torch", "layers": "torch", "drawing": "torch", "decode steps": "launched",
        "prompt steps": "launched",
    }  # fmt: skip
    assert run(None, ragged(CONFIG, 6, 5), runner=runner) == run(make_model(CONFIG), ragged(CONFIG, 6, 5))


@pytest.mark.parametrize("why", ["EB_KERNELS=off", "an old card"])
def test_without_kernels_nothing_is_compiled(why: str, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose.agreed(lambda: ("fast", 0.0, ()), torch.float16, "x", CUDA) == "fast"
    if why == "an old card":
        gpu["get_device_capability"] = (6, 1)
    else:
        monkeypatch.setenv("EB_KERNELS", "off")
    assert choose.agreed(failing(AssertionError("compiled")), torch.float16, "x", CUDA) is None


@pytest.mark.parametrize(
    ("change", "driver", "words"),
    [
        ({"is_available": False}, False, "sees no GPU"),
        ({"is_available": False}, True, "is a build for CPUs. Delete .venv"),
        ({"is_available": False, "cuda": "13.0", "init": RuntimeError("The NVIDIA driver on your system is too old (found "
          "version 11040). Please update")}, True, "cannot compute on the GPU: The NVIDIA driver on your system is too old"),
        ({"ones": RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel")}, True,
         "no kernel image is available for execution on the device"),
        ({"ones": RuntimeError("CUDA-capable device(s) is/are busy or unavailable")}, True, "busy or unavailable"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_compute_is_named_and_the_cpu_serves(
    change: dict[str, Any],
    driver: bool,
    words: str,
    gpu: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", change.pop("cuda", None))
    error = change.pop("ones", None)
    monkeypatch.setattr(torch, "ones", failing(error) if error else lambda *_, **__: torch.zeros(2))
    gpu.update(change)
    monkeypatch.setattr(card, "DRIVER", tmp_path if driver else tmp_path / "none")
    assert machine.choose_device("auto").type == "cpu"
    with pytest.raises(machine.MachineError, match=r"--device is cuda, but torch .*use --device cpu") as refused:
        machine.choose_device("cuda")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_card_that_computes_is_chosen(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(2))
    assert machine.choose_device("auto") == machine.choose_device("cuda") == CUDA
    assert machine.choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"device_count": 2}, "there are 2 cards, and this server uses only NVIDIA X. CUDA_VISIBLE_DEVICES"),
        ({"mem_get_info": (30 * GIB, 80 * GIB)}, "other programs use 50.0 of the 80.0 GiB"),
        ({"get_device_capability": (6, 1)}, "compute capability 6.1, but Triton needs 7.0"),
        ({"is_bf16_supported": False}, "no bfloat16 in hardware"),
    ],
)
def test_what_costs_speed_or_memory_is_a_sentence(
    change: dict[str, Any], words: str | None, gpu: dict[str, Any]
) -> None:
    gpu.update(change)
    found = card.remarks(CUDA, torch.bfloat16)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]
