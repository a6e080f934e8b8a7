"""The same requests offline and through HTTP, in a burst and at a Poisson rate, for every policy.

    python -m dev.benchmarks.serving --load-format dummy --json dev/benchmarks/results/serving.json

Offline, this process drives the scheduler and the engine with no server around them. Over HTTP, a real server is
started for each policy and the project's own client sends the same prompts and lengths. What the server costs is the
ratio of the two; what a policy gains is the ratio between servers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import policies
from client.data import plan
from client.workloads.arrivals import Arrivals
from config import Config
from dev.benchmarks import report
from dev.benchmarks.server import started
from generate.params import SamplingParams
from launch.engine import load_engine
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

ROOT = Path(__file__).resolve().parents[2]
console = Console(stderr=True)


def offline(args: argparse.Namespace) -> dict[str, float]:
    """Serve the burst with no HTTP; return tokens a second for each policy."""
    config = Config(
        policy="dynamic", model=args.model, load_format=args.load_format, dtype=args.dtype,
        quantize=args.quantize, kv_dtype=args.kv_dtype, max_batch_size=args.numsamples,
    )  # fmt: skip
    engine = load_engine(config)
    assert engine.manager.pages is not None
    engine.manager.stop()
    trace = plan(args.numsamples, None, "normal", Arrivals("burst"), args.seed)
    prompts = [(engine.tokenizer.encode(p.prompt), p.num_tokens) for p in trace]
    rates: dict[str, float] = {}
    for name in args.policies:
        times = []
        for _ in range(args.repeats if name != "nobatch" else 1):
            pool = PagePool(engine.manager.pages.total + 1, engine.page_size)
            policy = policies.get_policy(name, max_batch_size=args.numsamples)
            scheduler = Scheduler(policy, pool, engine.manager.max_tokens_per_step)
            for i, (ids, tokens) in enumerate(prompts):
                params = SamplingParams(seed=i)
                scheduler.add(Sequence(ids, tokens, id=str(i), sampling=params))
            began = time.perf_counter()
            while not scheduler.is_idle:
                scheduler.step(engine.manager.model.forward, time.perf_counter)
            times.append(time.perf_counter() - began)
        rates[name] = sum(tokens for _, tokens in prompts) / statistics.median(times)
        console.print(f"offline {name}: {rates[name]:.0f} tokens/s")
    return rates


def load(port: int, args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """Run the project's client against the server; return its result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable, str(ROOT / "client" / "client.py"), "--port", str(port), "--seed",
            str(args.seed), "--no-stream", "--json", str(path), *flags,
        ]  # fmt: skip
        environment = os.environ | {"IP": "127.0.0.1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def over_http(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return for each policy the burst's tokens a second and the Poisson load's latency per token."""
    figures: dict[str, dict[str, float]] = {}
    flags = (
        "--model", args.model, "--load-format", args.load_format, "--dtype", args.dtype, "--quantize", args.quantize,
        "--kv-dtype", args.kv_dtype, "--max-batch-size", str(args.numsamples), "--speculate", "off",
    )  # fmt: skip
    for name in args.policies:
        with started(name, *flags) as (port, _):
            load(port, args, "--prompt", "warm up", "--numtokens", "8")
            repeats = args.repeats if name != "nobatch" else 1
            bursts = [load(port, args, "--burst", "--numsamples", str(args.numsamples)) for _ in range(repeats)]
            speeds = [b["output_throughput"] for b in bursts]
            figures[name] = {"burst": statistics.median(speeds)}
            if len(speeds) > 1:
                figures[name]["burst_low"], figures[name]["burst_high"] = report.interval(speeds)
            if args.poisson:
                calm = load(port, args, "--rate", str(args.rate), "--numsamples", str(args.poisson))
                figures[name]["latency_per_token"] = calm["server_after"]["latency-per-token"]
                figures[name]["ms_per_token"] = calm["mean_latency_per_token_ms"]
        console.print(f"HTTP {name}: {figures[name]}")
    return figures


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, figures in result["http"].items():
        alone = result["offline"].get(name)
        between = f" ({figures['burst_low']:.0f} to {figures['burst_high']:.0f})" if "burst_low" in figures else ""
        rows.append((
            name, f"{alone:.0f}" if alone else "", f"{figures['burst']:.0f}{between}",
            f"{figures['burst'] / alone:.2f}" if alone else "",
            f"{figures['ms_per_token']:.1f}" if "ms_per_token" in figures else "",
        ))  # fmt: skip
    heads = ("policy", "offline tokens/s", "HTTP tokens/s", "HTTP / offline", "ms per token, Poisson")
    report.show(f"{result['model']}, burst of {result['requests']}, {result['rate']}/s Poisson", heads, rows)


def main() -> None:
    parser = report.parser("serving", __doc__)
    report.add_model(parser, "float16")
    policies = ["nobatch", "static", "dynamic"]
    parser.add_argument("--policies", type=lambda t: t.split(","), default=policies, help="separated by commas")
    parser.add_argument("--numsamples", type=int, default=64, help="number of requests in the burst, and of slots")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of the Poisson load")
    parser.add_argument("--poisson", type=int, default=30, help="number of requests in the Poisson load; 0: none")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="number of bursts; reported are their median and the 90 %% interval of their mean",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--skip-offline", action="store_true", help="measure over HTTP only")
    args = parser.parse_args()
    result = {
        "model": args.model, "load_format": args.load_format, "dtype": args.dtype,
        "quantize": args.quantize, "kv_dtype": args.kv_dtype,
        "requests": args.numsamples, "rate": args.rate, "seed": args.seed,
        "http": over_http(args), "offline": {} if args.skip_offline else offline(args),
    }  # fmt: skip
    show(result)
    report.finish("serving", result, args.json)


if __name__ == "__main__":
    main()
