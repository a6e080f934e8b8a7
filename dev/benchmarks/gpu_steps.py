"""Decode steps and prompts on a GPU, against the limit of the machine's bandwidth and arithmetic."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.console import Console

from dev.benchmarks import gpu_checks, offline
from dev.benchmarks import machine as measured
from dev.benchmarks.gpu_loader import Keep, Loader, Sizes
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY
from scheduling.iteration import Plan
from scheduling.sequence import Sequence

STEPS = 32  # of a round of decoding, which ends at the requested context
UNTIMED = 3  # first steps of a round, which were not launched ahead
console = Console(stderr=True)


def measure_decode(loader: Loader, sizes: Sizes, keep: Keep) -> list[dict[str, Any]]:
    """Return for each batch and context the median step and its fraction of the limit; for the first, also sampled."""
    bandwidth = gpu_checks.bandwidth(loader.device)  # before the pages take their share
    rate = gpu_checks.arithmetic(loader.device, loader.dtype)
    most = max(sizes.batch) * -(-max(sizes.context) // loader.page_size)
    runner = loader.runner(most * loader.page_size, max(sizes.batch))
    for pool in (runner.keys, runner.values):
        pool.zero_()  # the cost of a step does not depend on its numbers, as long as they are finite
    if runner.device.type == "cuda":
        torch.cuda.synchronize()  # the runner has a stream of its own
    rows: list[dict[str, Any]] = []
    for context in sizes.context:
        for batch in sizes.batch:
            if batch * -(-context // runner.page_size) >= runner.keys.shape[1]:
                console.print(f"batch {batch} with context {context} does not fit into the memory")
                continue
            step = _median_step(runner, batch, context, sizes.seconds, 0.0)
            mean = context - STEPS // 2
            limit = measured.limit_seconds(loader.shape, runner.dtype, batch, mean, bandwidth, rate)
            rows.append({"batch": batch, "context": context, "step_ms": step * 1e3,
                         "tokens_per_s": batch / step, "fraction": limit / step,
                         "bandwidth_gb_s": bandwidth / 1e9, "rate_gflop_s": rate / 1e9,
                         "attention": runner.attention, "layers": runner.network.math.name,
                         "drawing": runner.kernels["drawing"],
                         "graphs": hasattr(runner.decoder.replayer, "graphs")})  # fmt: skip
            if context == sizes.context[0]:
                rows[-1]["sampled_step_ms"] = _median_step(runner, batch, context, sizes.seconds, 1.0) * 1e3
            keep(rows)
    return rows


def _median_step(runner: GpuRunner, batch: int, context: int, seconds: float, temperature: float) -> float:
    """Return the median of the steps of as many rounds as fit into `seconds`, at least one."""
    past, spare = max(1, context - STEPS), min(STEPS, context - 1)
    sequences = offline.decoding(runner, batch, past, temperature, spare)
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < seconds:
        times += _time_round(runner, sequences)
    return statistics.median(times)


def _time_round(runner: GpuRunner, sequences: list[Sequence]) -> list[float]:
    """Return the seconds of steps that decode the same sequences repeatedly, up to the context."""
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


def measure_prefill(loader: Loader, sizes: Sizes, keep: Keep) -> list[dict[str, Any]]:
    """Return the median seconds of one prompt of each length, computed in one piece."""
    runner = loader.runner(2 * max(sizes.prefill), 1)
    rows: list[dict[str, Any]] = []
    for tokens in sizes.prefill:
        tokens = min(tokens, runner.config.block_size)
        seq = Sequence([i % runner.config.vocab_size for i in range(tokens)], 1, sampling=GREEDY)
        seq.pages = list(range(1, runner.keys.shape[1]))
        times = []
        for _ in range(6):
            began = time.perf_counter()
            runner.forward(Plan(1, 0.0, [seq], [tokens]))
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:])
        rows.append({"tokens": tokens, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds,
                     "attention": runner.prefill.attend.name})  # fmt: skip
        keep(rows)
    return rows
