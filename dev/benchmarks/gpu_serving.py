"""Requests without HTTP and over it, at temperature 1: the steady state of a full batch, and a burst for every policy.

A burst has as many requests as slots, so its prompts come together and most of its steps have a batch that empties. In
the steady state, a client sends a request as soon as another is answered, so that only both ends have such steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

from dev.benchmarks import offline, report, serving
from dev.benchmarks.gpu_loader import Keep, Loader, Sizes, clear
from dev.benchmarks.peers.measure import requests
from dev.benchmarks.server import started
from generate.gpu.rows import Download
from generate.params import SamplingParams
from models.text.tokenizer import load_tokenizer
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence


def run(args: argparse.Namespace, loader: Loader, sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Return for each load the tokens per second of the engine alone and over HTTP, and what the host did meanwhile."""
    loads = [("steady", "dynamic", sizes.steady, sizes.slots, f"closed:{sizes.slots}", 1)]
    for policy in args.policies:
        loads.append((f"burst {policy}", policy, sizes.burst, sizes.burst, "burst", 1 if policy == "nobatch" else 3))
    model = f"--model={sizes.model}", f"--load-format={args.load_format}"
    machine = f"--device={args.device}", f"--dtype={args.dtype}"
    results: dict[str, Any] = {}
    for name, policy, count, slots, load, repeats in loads:
        results[name] = engine(loader, policy, count, slots, args.seed)
        keep(results)
        clear()  # the server needs the card
        sent = f"--load={load}", f"--numsamples={count}", "--temperature=1"
        for front_ends in (0, 3) if name == "steady" and args.device != "cpu" else (0,):
            own = f"--max-batch-size={slots}", "--speculate=off", f"--front-ends={front_ends}"
            with started(policy, *model, *machine, *own) as (port, _):
                rates = [serving.load(port, args, *sent)["output_throughput"] for _ in range(repeats)]
            key = f"http_{front_ends}_front_ends" if front_ends else "http"
            interval = report.interval(rates) if repeats > 1 else None
            results[name] |= {key: statistics.median(rates), f"{key}_interval": interval}
            keep(results)
    return results


def sequences_of(loader: Loader, count: int, seed: int) -> list[Sequence]:
    """Return the requests that the client sends."""
    encode, order = load_tokenizer(loader.resolved).encode, requests(count, seed)
    return [Sequence(encode(text), n, sampling=SamplingParams(seed=i)) for i, (text, n) in enumerate(order)]


def engine(loader: Loader, policy: str, count: int, slots: int, seed: int) -> dict[str, Any]:
    """Return the engine's rate, its steps, and the host's time in them, which is all that is not waiting for tokens."""
    sequences = sequences_of(loader, count, seed)
    longest = max(seq.length + seq.max_tokens for seq in sequences)
    runner = loader.runner(slots * (longest + loader.page_size), slots)
    waited, steps, decodes = 0.0, 0, 0
    read, forward = Download.read, runner.forward

    def timed_read(self: Download) -> list[int]:
        nonlocal waited
        began = time.perf_counter()
        tokens = read(self)
        waited += time.perf_counter() - began
        return tokens

    def counted_forward(plan: Plan) -> list[Output]:
        nonlocal steps, decodes
        steps, decodes = steps + 1, decodes + any(seq.output_ids for seq in plan.sequences)
        return forward(plan)

    with mock.patch.object(Download, "read", timed_read), mock.patch.object(runner, "forward", counted_forward):
        began = time.perf_counter()
        offline.serve(runner, sequences, policy, slots)
        seconds = time.perf_counter() - began
    return {"requests": count, "slots": slots, "engine": sum(seq.max_tokens for seq in sequences) / seconds,
            "steps": steps, "decode_steps": decodes, "used_ahead": runner.decoder.used_ahead,
            "step_ms": seconds / steps * 1e3, "host_ms": (seconds - waited) / steps * 1e3}  # fmt: skip
