"""What the machine computes with: number formats and threads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generate import cgroups, cores, machine
from models.sources import catalog

CARD = torch.device("cuda")


@pytest.mark.parametrize(
    ("trained", "has_bfloat16", "chosen"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float16),
        ("float16", True, torch.float16),
        ("float32", True, torch.float16),
        (None, True, torch.float16),
    ],
)
def test_a_gpu_computes_in_the_format_of_the_model_if_it_can(
    trained: str | None, has_bfloat16: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bfloat16)
    assert machine.choose_dtype("auto", CARD, trained) == chosen
    assert machine.choose_dtype("float32", CARD, trained) == torch.float32


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": 16}, None),
        ({}, None),
    ],
)
def test_a_config_names_the_format_of_its_model(config: dict[str, object], trained: str | None) -> None:
    resolved = catalog.resolve("bard")
    assert replace(resolved, config=config).trained_dtype == trained


@pytest.mark.parametrize(
    ("flags", "processor", "compiler", "faster"),
    [
        ("avx2 fma avx512_bf16", "x86_64", False, True),
        ("asimd bf16", "aarch64", False, True),
        ("avx2 fma", "x86_64", True, True),
        ("asimd", "aarch64", True, True),
        ("avx2 fma", "x86_64", False, False),
        ("avx avx512bf16x", "x86_64", True, False),
        (None, "arm64", True, True),
        (None, "x86_64", True, False),
    ],
)
def test_a_cpu_takes_bfloat16_where_it_or_our_kernels_compute_it_faster(
    flags: str | None, processor: str, compiler: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path) -> str:
        if flags is None:
            raise FileNotFoundError(path)
        return f"model name\t: any\nflags\t\t: fpu {flags}\n"

    monkeypatch.delenv("EB_KERNELS", raising=False)
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setenv("CC", "true" if compiler else "no-such-compiler")
    assert machine.bfloat16_is_faster() is faster
    assert machine.choose_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if faster else torch.float32)


GIB = 1 << 30
USED = f"anon 0\ninactive_file {GIB >> 2}"
FIRST = "30 24 0:26 {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
SECOND = "30 24 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
# The groups of a process, its mounts, the files of its groups; its processors and free memory.
TREES = {
    "no limit": ("0::/", SECOND.format(root="/"), {"cpu.max": "max 100000", "memory.max": "max"}, None, None),
    "a container of version 2": (
        "0::/", SECOND.format(root="/"),
        {"cpu.max": "150000 100000", "memory.max": f"{2 * GIB}", "memory.current": f"{GIB}", "memory.stat": USED},
        1.5, 1.25 * GIB,
    ),
    "a parent's limits, such as those of a slice of systemd": (
        "0::/user.slice/run.service", SECOND.format(root="/"),
        {"user.slice/cpu.max": "50000 100000", "user.slice/run.service/cpu.max": "200000 100000",
         "user.slice/memory.max": f"{GIB}", "user.slice/memory.current": f"{2 * GIB}", "user.slice/memory.stat": USED},
        0.5, 0,
    ),
    "groups outside the part that is seen": (
        "0::/../elsewhere", SECOND.format(root="/mine"), {"cpu.max": "300000 100000"}, 3, None,
    ),
    "version 1": (
        "4:memory:/a/b\n3:cpu:/\n0::/", FIRST.format(root="/", name="memory") + FIRST.format(root="/", name="cpu"),
        {"memory/a/memory.limit_in_bytes": f"{GIB}", "memory/a/memory.usage_in_bytes": f"{GIB // 2}",
         "memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB >> 2}", "memory/a/b/memory.limit_in_bytes": f"{2**63 - 4096}",
         "cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
        2.5, 0.75 * GIB,
    ),
    "a container of version 1": (
        "4:memory:/docker/x\n3:cpu:/docker/x",
        FIRST.format(root="/docker/x", name="memory") + FIRST.format(root="/docker/x", name="cpu"),
        {"memory/memory.limit_in_bytes": f"{GIB}", "memory/memory.usage_in_bytes": "0", "memory/memory.stat": USED,
         "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        None, 1.25 * GIB,
    ),
    "another system": (None, "", {}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_limits_of_a_process_are_those_of_its_control_group_and_all_parents(name: str, tmp_path: Path) -> None:
    groups, mounts, files, processors, free = TREES[name]
    if groups is not None:
        files = {f"sys/fs/cgroup/{file}": text for file, text in files.items()}
        files |= {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text + "\n")
    assert cgroups.processors(tmp_path) == (processors or math.inf)
    assert cgroups.free_memory(tmp_path) == (math.inf if free is None else free)


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.5, 2), (9, 8), (math.inf, 8)])
def test_there_are_as_many_threads_as_processors_that_this_process_may_use(
    quota: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "processors", lambda: quota)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(8)))
    assert cores.cores.__wrapped__() == expected


def test_memory_beyond_the_limits_of_a_process_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "free_memory", lambda: 1000)
    assert machine.free_memory(torch.device("cpu")) == 1000
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (900, -1))  # less than is mapped
    assert machine.free_memory(torch.device("cpu")) == 0
