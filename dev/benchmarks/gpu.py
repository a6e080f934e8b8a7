"""The engine on a GPU in one run of a few minutes: its correctness, its distance from the limit, and its peers.

    dev/benchmarks/gpu.sh --json dev/benchmarks/results/gpu.json

Decode steps and prompts come first (`gpu_steps.py`), then checks (`gpu_checks.py`), then the steady state and bursts,
also over HTTP (`gpu_serving.py`), then peers on a burst (`gpu_peers.py`): those of --peer, and transformers. When
--minutes are over, the rest gives way: what is compiled for minutes is last, and --sections names others, in another
order. The results so far are written after each figure.
Without a GPU all of it runs at small sizes on the CPU, Triton's kernels in its interpreter: those figures show that
the code runs, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

from dev.benchmarks import gpu_checks, gpu_peers, gpu_serving, gpu_steps, report
from dev.benchmarks import machine as measured
from dev.benchmarks.gpu_loader import FULL, SMALL, Keep, Loader, Sizes, clear
from dev.benchmarks.peers.__main__ import PEERS
from generate import machine

SECTIONS = ("decode", "prefill", "checks", "serving", "peers")
SPARE_SECONDS = 30.0  # after --minutes, for code that blocks signals; then the process ends
console = Console(stderr=True)


class TimeIsUp(BaseException):
    """The minutes of a run are over; a BaseException, so that no section handles it as its own failure."""


def run(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Run the sections in turn, and write the results after each figure, as a card is often rented by the minute.

    A section that fails, or that `--minutes` cuts off, has its results so far, or None; `failed` gives the reason.
    """
    began = time.monotonic()
    loader = Loader(sizes.model, args.load_format, args.device, args.dtype)
    parts: dict[str, Callable[[Keep], Any]] = {
        "checks": lambda keep: gpu_checks.run(loader, sizes, keep),
        "decode": lambda keep: gpu_steps.measure_decode(loader, sizes, keep),
        "prefill": lambda keep: gpu_steps.measure_prefill(loader, sizes, keep),
        "serving": lambda keep: gpu_serving.run(args, loader, sizes, keep),
        "peers": lambda keep: gpu_peers.run(args, loader, sizes, keep),
    }
    result: dict[str, Any] = {
        "benchmark": "gpu", "gpu": gpu_checks.card(loader.device), "model": sizes.model,
        "load_format": args.load_format, "dtype": str(loader.dtype).removeprefix("torch."),
        "machine": measured.describe(), "command": args.command, "failed": [],
    }  # fmt: skip

    def keep(name: str, section: Any) -> None:
        result[name] = section
        report.keep(args.json, result)

    for name in args.sections:
        result[name] = None
        left = began + args.minutes * 60 - time.monotonic()
        if left <= 0:
            console.print(f"{name}: skipped, {args.minutes:g} minutes are over")
        else:
            attempt(name, parts[name], functools.partial(keep, name), left, result["failed"])
        keep(name, result[name])
    return result


def attempt(name: str, section: Callable[[Keep], Any], keep: Keep, seconds: float, failed: list[str]) -> None:
    """Keep the result of a section; if it fails or takes more than `seconds`, add the reason to `failed`."""
    began = time.monotonic()
    try:
        with within(seconds):
            keep(section(keep))
    except (Exception, TimeIsUp) as error:  # the other sections still run
        console.print_exception()
        failed.append(f"{name}: {type(error).__name__}: {error}")
    with contextlib.suppress(RuntimeError):  # a broken device fails again
        clear()  # the next section, or its processes, need the card
    console.print(f"{name}: {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp inside the block after `seconds`."""

    def ring(*_: object) -> None:
        raise TimeIsUp("the minutes are over")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def show(result: dict[str, Any]) -> None:
    console.print(f"{result['gpu'] or 'no GPU: these figures show only that the code runs'}")
    if result.get("checks"):
        console.print_json(data=result["checks"])
    rows = [
        (str(r["batch"]), str(r["context"]), f"{r['step_ms']:.3f}", f"{r['tokens_per_s']:.0f}", f"{r['fraction']:.2f}")
        for r in result.get("decode") or ()
    ]
    heads = ("batch", "context", "ms a step", "tokens/s", "of the limit")
    report.show(f"{result['model']} {result['dtype']}, decode", heads, rows, left=0)
    for r in result.get("prefill") or ():
        console.print(f"prefill {r['tokens']}: {r['ms']:.2f} ms, {r['tokens_per_s']:.0f} tokens/s")
    for name, r in (result.get("serving") or {}).items():
        http = f"{r['http']:.0f} over HTTP ({r['http'] / r['engine']:.2f})" if "http" in r else "not measured over HTTP"
        console.print(f"{name}: {r['engine']:.0f} tokens/s, {http}; {r['used_ahead']} of {r['decode_steps']} decodes "
                      f"used ahead; host {r['host_ms']:.2f} of {r['step_ms']:.2f} ms a step")  # fmt: skip
    for name, figure in (result.get("peers") or {}).items():
        console.print(f"{name}: {figure:.0f} tokens/s" if isinstance(figure, float) else f"{name}: {figure}")


def parser() -> argparse.ArgumentParser:
    result = report.parser("gpu", __doc__)
    result.prog = "dev/benchmarks/gpu.sh"
    words, numbers = (lambda t: t.split(",")), (lambda t: [int(n) for n in t.split(",")])
    result.add_argument("--sections", type=words, default=list(SECTIONS), help=",".join(SECTIONS))
    result.add_argument("--model", help="default: gpt2-medium on a GPU, else bard")
    result.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    result.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    result.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    result.add_argument("--policies", type=words, default=["dynamic", "static", "nobatch"], help="of bursts")
    for name in ("batch", "context", "prefill"):
        result.add_argument(f"--{name}", type=numbers)
    for name in ("prompts", "tokens", "burst", "steady", "slots"):
        result.add_argument(f"--{name}", type=int)
    result.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM[@FORMAT]",
                        help="also this server, such as vllm=vllm/bin/python@float16; it takes minutes")  # fmt: skip
    result.add_argument("--seed", type=int, default=1, help="of the requests over HTTP")
    result.add_argument("--seconds", type=float, help="per figure")
    result.add_argument("--minutes", type=float, default=9.0, help="the run ends after them, with what it has")
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parser().parse_args(argv)
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        raise SystemExit(f"error: unknown section {', '.join(sorted(unknown))}. Use {', '.join(SECTIONS)}")
    if unknown := {text.partition("=")[0] for text in args.peer} - set(PEERS):
        raise SystemExit(f"error: unknown peer {', '.join(sorted(unknown))}. Use {', '.join(PEERS)}")
    on_gpu = machine.choose_device(args.device).type == "cuda"
    machine.use_threads(0 if on_gpu else 1)  # more threads of such a small model only wait for each other
    base = FULL if on_gpu else SMALL
    chosen = {name: getattr(args, name) for name in vars(base) if getattr(args, name) is not None}
    if argv is None:  # a kernel that hangs blocks signals
        faulthandler.dump_traceback_later(max(0.0, args.minutes * 60) + SPARE_SECONDS, exit=True)
    args.command = "dev/benchmarks/gpu.sh " + " ".join(sys.argv[1:] if argv is None else argv)
    result = run(args, Sizes(**{**vars(base), **chosen}))
    show(result)
    print(json.dumps(result))
    if result["failed"]:
        raise SystemExit("error: " + "; ".join(result["failed"]))
    return result


if __name__ == "__main__":
    main()
