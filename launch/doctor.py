"""`./server.sh doctor`: one line for each requirement of the server on this machine, with a remedy for what is missing.

The checks change nothing and download no model.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from config import Config, ConfigError
from costs import mock
from launch import banner, load_model, preflight
from models.sources import catalog

GIB = 1 << 30
LEAST_FREE = 2 * GIB  # enough for torch and gpt2-medium
OF_WEIGHTS = ("torch", "device", "compiler")  # a mock model computes nothing


def examine(config: Config) -> bool:
    """Print a line for each check; return whether all checks pass."""
    checks: dict[str, Callable[[Config], str]] = {
        "python": _python, "torch": _torch, "gpu": _gpu, "device": _device, "compiler": _compiler,
        "disk": _disk, "open files": _open_files, "port": _port, "weights": _weights, "tokenizer": _tokenizer,
    }  # fmt: skip
    passed = True
    for name, check in checks.items():
        try:
            needed = name not in OF_WEIGHTS or not mock.is_mock(config.model)
            verdict, text = "ok", check(config) if needed else f"{config.model} needs none"
        except Exception as error:  # the other checks must still run
            verdict, text, passed = "NO", f"{error}" or type(error).__name__, False
        print(f"{verdict:<4}{name:<12}{text}")  # noqa: T201
    return passed


def _python(config: Config) -> str:
    return f"{platform.python_version()} on {platform.machine()}"


def _torch(config: Config) -> str:
    preflight.check_torch(config)
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"cannot import torch: {error}. Run ./server.sh, which installs it") from None
    return torch.__version__


def _device(config: Config) -> str:
    from generate import machine

    device = machine.choose_device(config.device)
    if device.type == "cuda":
        return f"computes on {device}: {_speed(config)}"
    dtype = str(machine.choose_dtype(config.dtype, device, quantize=config.quantize)).removeprefix("torch.")
    return f"computes on {device} in {dtype}"


def _gpu(config: Config) -> str:
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver"
    query = "--query-gpu=name,driver_version,memory.free,memory.total,compute_cap"
    done = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ConfigError(f"nvidia-smi fails: {(done.stdout or done.stderr).strip()}. Install or restart the driver")
    return "\n    ".join(done.stdout.splitlines())


def _speed(config: Config) -> str:
    """Load a model with random weights, which prints the result for each fast part; return parts and tokens/s."""
    logging.basicConfig(stream=sys.stdout, format="    %(message)s")
    logging.getLogger("generate.gpu").setLevel(logging.INFO)
    slots = config.max_batch_size
    name = config.model if config.model and catalog.is_here(config.model, "dummy") else catalog.DEFAULT
    parts = load_model.load_model(dataclasses.replace(config, model=name, load_format="dummy"), slots)
    speeds = ", ".join(f"{load_model.warm_up(parts.model, n, 100):,.0f} with {n}" for n in (1, slots))
    found = "; ".join([banner.kernels(parts.facts), *parts.facts["warnings"]])
    return f"{found}; tokens/s of {parts.model_name}: {speeds} requests"


def _compiler(config: Config) -> str:
    from generate.cpu import kernels

    return " ".join(kernels.find_compiler())


def _disk(config: Config) -> str:
    preflight.check_folders(os.environ)
    home = Path.home() if Path.home().is_dir() else Path("/")
    free = shutil.disk_usage(home).free
    if free < LEAST_FREE:
        raise ConfigError(
            f"{free / GIB:.1f} GiB are free at {home}, but {LEAST_FREE / GIB:.0f} are needed. "
            "Free some space, or set HF_HOME and EB_CACHE_DIR to another disk"
        )
    return f"{free / GIB:.1f} GiB free at {home}"


def _open_files(config: Config) -> str:
    preflight.check_open_files(config)
    return f"enough for {config.connections:,} connections"


def _port(config: Config) -> str:
    preflight.check_port(config)
    return f"{config.host}:{config.port} is free"


def _weights(config: Config) -> str:
    if mock.is_mock(config.model):
        mock.load(config.model)
        return f"{config.model} needs no weights"
    resolved = _resolved(config)
    where = f"{resolved.name}: {resolved.path or 'random weights'}"
    if resolved.name == "bard" and not config.model:
        where += f"; {catalog.DEFAULT} is not in the cache: the first start downloads it, or serves bard if the download fails"
    return where


def _tokenizer(config: Config) -> str:
    preflight.check_tokenizer_file(config)
    tokenizer = load_model.tokenizer_of(config, None if mock.is_mock(config.model) else _resolved(config))
    return f"{tokenizer.vocab_size:,} ids" + (f"; {tokenizer.warning}" if tokenizer.warning else "")


def _resolved(config: Config) -> catalog.ResolvedModel:
    """Find the model as the server would, but without downloads."""
    name = config.model or catalog.DEFAULT
    if catalog.is_here(config.model or None, config.load_format):
        return catalog.resolve(config.model or None, config.load_format)
    if not config.model:
        return catalog.resolve("bard", config.load_format)
    raise ConfigError(
        f"{name} is not in the cache. The first start downloads it if the model hub can be reached. Otherwise set "
        "HF_HOME to a cache that has it, or use --model bard"
    )
