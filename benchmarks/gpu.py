"""The engine on a GPU, in one run of a few minutes: is it right, how near is it to the limit, what do others do?

    benchmarks/gpu.sh --json benchmarks/results/gpu.json

Decode steps and prompts come first, against the limit of the bandwidth and arithmetic measured in the same run, then
checks (`gpu_checks.py`), then a burst over HTTP for every policy, then transformers on the same requests
(`gpu_peers.py`). What there is by then is written after each figure. Without a GPU all of it runs at small sizes on
the CPU, Triton's kernels in its interpreter: those figures say that the code runs, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks when it is imported

from benchmarks import gpu_checks, gpu_peers
from benchmarks import machine as measured
from generate import machine
from generate.gpu.runner import GpuRunner, make_runner
from generate.params import SamplingParams
from models import catalog, weights
from scheduling.iteration import Plan
from scheduling.sequence import Sequence

ROOT = Path(__file__).resolve().parents[1]
STEPS = 32  # of a round of decoding, at whose end the context is what was asked for
UNTIMED = 3  # first steps of a round: nobody launched them ahead
SECTIONS = ("decode", "prefill", "checks", "serving", "peers")
SPARE_SECONDS = 30.0  # after the minutes, for what hears no signal; then the process ends
Keep = Callable[[Any], None]  # is given what a section has found so far
console = Console(stderr=True)


class TimeIsUp(BaseException):
    """The minutes of a run are over; no section may take it for a failure of its own."""


@dataclass(frozen=True)
class Sizes:
    """How much a run does."""

    model: str
    batch: list[int]
    context: list[int]
    prefill: list[int]
    prompts: int
    tokens: int
    burst: int
    seconds: float  # of each figure


FULL = Sizes("gpt2-medium", [1, 8, 32, 64, 128, 256, 512], [128, 512, 1024], [128, 512, 1024],
             prompts=100, tokens=100, burst=256, seconds=1.0)  # fmt: skip
SMALL = Sizes("bard", [1, 4], [64], [48], prompts=6, tokens=12, burst=8, seconds=0.2)


class Loader:
    """Makes runners of one model; one at a time fills the card."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        self.resolved = catalog.resolve(sizes.model, args.load_format)
        self.device = machine.choose_device(args.device)
        self.dtype = machine.choose_dtype(args.dtype, self.device)
        self.page_size = machine.page_size(self.device)

    def reference(self) -> Any:
        """Return the plain model in float32 on the CPU."""
        return weights.load(self.resolved, torch.float32).eval().requires_grad_(False)

    def runner(self, tokens: int, capacity: int, strict: bool = False) -> GpuRunner:
        """Return a warm runner with room for `tokens` tokens of KV, or for what the free memory holds."""
        clear()
        model = weights.load(self.resolved, self.dtype).to(self.device)
        most = machine.kv_pages(model.config, self.dtype, self.device, 0, capacity)
        pages = min(tokens // self.page_size + 2, most)
        return make_runner(model, pages, self.page_size, capacity, strict, any_format=False)


def clear() -> None:
    """Give back the card's memory that nobody uses: a runner is part of circles, which only a collection ends."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decoding(runner: GpuRunner, batch: int, context: int, temperature: float) -> list[Sequence]:
    """Return sequences STEPS tokens short of `context`, on pages of their own."""
    pages = -(-context // runner.page_size)
    start = max(1, context - STEPS)
    result = []
    for i in range(batch):
        prompt = [(i * 7919 + j) % runner.config.vocab_size for j in range(start)]
        params = SamplingParams(temperature=temperature, seed=i)
        seq = Sequence(prompt, 1 << 20, id=str(i), sampling=params)
        seq.pages = list(range(1 + i * pages, 1 + (i + 1) * pages))
        result.append(seq)
    return result


def time_round(runner: GpuRunner, sequences: list[Sequence]) -> list[float]:
    """Return the seconds of steps that decode the same sequences on and on, up to the context."""
    for seq in sequences:
        seq.output_ids, seq.computed = [1], len(seq.prompt_ids)
    plan, times = Plan(1, 0.0, sequences, [1] * len(sequences)), []
    for _ in range(min(STEPS, runner.config.block_size - len(sequences[0].prompt_ids))):
        began = time.perf_counter()
        tokens = runner.forward(plan)
        times.append(time.perf_counter() - began)
        for seq, token in zip(sequences, tokens):
            seq.output_ids.append(token if isinstance(token, int) else 0)
            seq.computed += 1
    return times[UNTIMED:]


def measure_decode(loader: Loader, sizes: Sizes, keep: Keep) -> list[dict[str, Any]]:
    """Return for each batch and context the median step and its fraction of the limit."""
    bandwidth = gpu_checks.bandwidth(loader.device)  # before the pages take their share
    rate = gpu_checks.arithmetic(loader.device, loader.dtype)
    most = max(sizes.batch) * -(-max(sizes.context) // loader.page_size)
    runner = loader.runner(most * loader.page_size, max(sizes.batch))
    for pool in (runner.keys, runner.values):
        pool.zero_()  # what a step costs does not depend on the numbers, as long as they are numbers
    if runner.device.type == "cuda":
        torch.cuda.synchronize()  # the runner has a stream of its own
    rows: list[dict[str, Any]] = []
    for context in sizes.context:
        for batch in sizes.batch:
            if batch * -(-context // runner.page_size) >= runner.keys.shape[1]:
                console.print(f"batch {batch} with context {context} does not fit into the memory")
                continue
            sequences = decoding(runner, batch, context, 0.0)
            times: list[float] = []
            began = time.perf_counter()
            while not times or time.perf_counter() - began < sizes.seconds:
                times += time_round(runner, sequences)
            step, mean = statistics.median(times), context - STEPS // 2
            limit = measured.limit_seconds(runner.config, runner.dtype, batch, mean, bandwidth, rate)
            rows.append({"batch": batch, "context": context, "step_ms": step * 1e3,
                         "tokens_per_s": batch / step, "fraction": limit / step,
                         "bandwidth_gb_s": bandwidth / 1e9, "rate_gflop_s": rate / 1e9,
                         "attention": runner.attention, "layers": runner.network.math.name,
                         "graphs": hasattr(runner.decoder.replayer, "graphs")})  # fmt: skip
            keep(rows)
    return rows


def measure_prefill(loader: Loader, sizes: Sizes, keep: Keep) -> list[dict[str, Any]]:
    """Return the median seconds of one prompt of each length, computed in one piece."""
    runner = loader.runner(2 * max(sizes.prefill), 1)
    rows: list[dict[str, Any]] = []
    for tokens in sizes.prefill:
        tokens = min(tokens, runner.config.block_size)
        seq = Sequence([i % runner.config.vocab_size for i in range(tokens)], 1)
        seq.sampling, seq.pages = (SamplingParams(temperature=0), list(range(1, runner.keys.shape[1])))
        times = []
        for _ in range(6):
            began = time.perf_counter()
            runner.forward(Plan(1, 0.0, [seq], [tokens]))
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:])
        rows.append({"tokens": tokens, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds,
                     "attention": runner.attend_prompts.name})  # fmt: skip
        keep(rows)
    return rows


def measure_serving(args: argparse.Namespace, sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Return what benchmarks.serving says of a burst under each policy."""
    found: dict[str, Any] = {"http": {}, "offline": {}, "requests": sizes.burst}
    for policy in args.policies:
        part = serve(args, sizes, policy)
        for name in ("http", "offline"):
            found[name].update(part[name])
        keep(found)
    return found


def serve(args: argparse.Namespace, sizes: Sizes, policy: str) -> dict[str, Any]:
    """Return the result of benchmarks.serving for one policy, in a process that has the card to itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serving.json"
        command = [
            sys.executable, "-m", "benchmarks.serving", "--model", sizes.model, "--load-format",
            args.load_format, "--dtype", args.dtype, "--policies", policy, "--numsamples", str(sizes.burst),
            "--poisson", "0", "--repeats", "3", "--json", str(path),
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                status = process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # the server that it started holds the card
                raise
        if status:
            raise RuntimeError(f"benchmarks.serving of {policy} ended with {status}")
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def run(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Run the sections in turn, and write what there is after each figure: a card is lent for minutes.

    A section that fails, or that `--minutes` cut off, has what it had found, or None; `failed` says why.
    """
    began = time.monotonic()
    loader = Loader(args, sizes)
    parts: dict[str, Callable[[Keep], Any]] = {
        "checks": lambda keep: gpu_checks.run(loader, sizes, keep),
        "decode": lambda keep: measure_decode(loader, sizes, keep),
        "prefill": lambda keep: measure_prefill(loader, sizes, keep),
        "serving": lambda keep: measure_serving(args, sizes, keep),
        "peers": lambda keep: gpu_peers.run(loader, sizes, keep),
    }
    result: dict[str, Any] = {
        "benchmark": "gpu", "gpu": gpu_checks.card(loader.device), "model": sizes.model,
        "load_format": args.load_format, "dtype": str(loader.dtype).removeprefix("torch."),
        "machine": measured.describe(), "command": args.command, "failed": [],
    }  # fmt: skip

    def keep(name: str, found: Any) -> None:
        result[name] = found
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for name in args.sections:
        result[name] = None
        left = began + args.minutes * 60 - time.monotonic()
        if left <= 0:
            console.print(f"{name}: left out, {args.minutes:g} minutes are over")
        else:
            attempt(name, parts[name], functools.partial(keep, name), left, result["failed"])
        keep(name, result[name])
    return result


def attempt(name: str, section: Callable[[Keep], Any], keep: Keep, seconds: float, failed: list[str]) -> None:
    """Keep what a section gives; why it gives no more, as after so many seconds, is shown and added to `failed`."""
    began = time.monotonic()
    try:
        with within(seconds):
            keep(section(keep))
    except (Exception, TimeIsUp) as error:  # the other sections' figures are worth having
        console.print_exception()
        failed.append(f"{name}: {type(error).__name__}: {error}")
    with contextlib.suppress(RuntimeError):  # a device that is beyond repair says so once more
        clear()  # the next section, or its processes, want the card
    console.print(f"{name}: {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in what runs inside when so many seconds are over."""

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
    console.print(f"{result['gpu'] or 'no GPU: these figures say only that the code runs'}")
    if result.get("checks"):
        console.print_json(data=result["checks"])
    table = Table(title=f"{result['model']} {result['dtype']}, decode")
    for name in ("batch", "context", "ms a step", "tokens/s", "of the limit"):
        table.add_column(name, justify="right")
    for r in result.get("decode") or ():
        table.add_row(str(r["batch"]), str(r["context"]), f"{r['step_ms']:.3f}",
                      f"{r['tokens_per_s']:.0f}", f"{r['fraction']:.2f}")  # fmt: skip
    console.print(table)
    for r in result.get("prefill") or ():
        console.print(f"prefill {r['tokens']}: {r['ms']:.2f} ms, {r['tokens_per_s']:.0f} tokens/s")
    serving = result.get("serving") or {"http": {}, "offline": {}}
    for name, figures in serving["http"].items():
        offline = serving["offline"][name]
        console.print(f"HTTP {name}: {figures['burst']:.0f} tokens/s, {figures['burst'] / offline:.2f} of offline")
    for name, figure in (result.get("peers") or {}).items():
        console.print(f"{name}: {figure:.0f} tokens/s" if isinstance(figure, float) else f"{name}: {figure}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words, numbers = (lambda t: t.split(",")), (lambda t: [int(n) for n in t.split(",")])
    result.add_argument("--sections", type=words, default=list(SECTIONS), help=",".join(SECTIONS))
    result.add_argument("--model", help="default: gpt2-medium on a GPU, else bard")
    result.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    result.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    result.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    result.add_argument("--policies", type=words, default=["dynamic", "static", "nobatch"])
    for name in ("batch", "context", "prefill"):
        result.add_argument(f"--{name}", type=numbers)
    for name in ("prompts", "tokens", "burst"):
        result.add_argument(f"--{name}", type=int)
    result.add_argument("--seconds", type=float, help="of each figure")
    result.add_argument("--minutes", type=float, default=9.0, help="after which what runs is cut off")
    result.add_argument("--json", type=Path)
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parser().parse_args(argv)
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        raise SystemExit(f"error: no section {', '.join(sorted(unknown))}. Use {', '.join(SECTIONS)}")
    on_gpu = machine.choose_device(args.device).type == "cuda"
    machine.use_threads(0 if on_gpu else 1)  # threads of so small a model only wait for each other
    base = FULL if on_gpu else SMALL
    chosen = {name: getattr(args, name) for name in vars(base) if getattr(args, name) is not None}
    if argv is None:  # a kernel that hangs hears no signal
        faulthandler.dump_traceback_later(max(0.0, args.minutes * 60) + SPARE_SECONDS, exit=True)
    args.command = "benchmarks/gpu.sh " + " ".join(sys.argv[1:] if argv is None else argv)
    result = run(args, Sizes(**{**vars(base), **chosen}))
    show(result)
    print(json.dumps(result))
    if result["failed"]:
        raise SystemExit("error: " + "; ".join(result["failed"]))
    return result


if __name__ == "__main__":
    main()
