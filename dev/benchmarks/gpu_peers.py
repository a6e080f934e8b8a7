"""The rates of transformers on the same requests: its continuous batching, and one padded static batch, also compiled.

Its model has random weights of the same shape, as the cost of a step does not depend on them. Decoding is greedy, and
every answer has the requested length. Rates are useful tokens per second, without loading and warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dev.benchmarks import gpu_serving
from dev.benchmarks.gpu_loader import Keep, Loader, Sizes, clear
from dev.benchmarks.peers import __main__ as peers
from dev.benchmarks.peers import hugging_face
from dev.benchmarks.peers.hugging_face import Burst


def named(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Return tokens per second of each --peer for the burst that the section serving sends, or why there are none."""
    flags = ("--model", sizes.model, "--load-format", args.load_format, "--slots", str(sizes.burst), "--single", "1")
    order = peers.arguments(flags)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        job = peers.job_of(order, Path(work))
        found = peers.run([peers.read_peer(text, job) for text in args.peer], [], order)
    rates = {f"{rates['name']} {rates['format']}": statistics.median(rates["burst"]) for rates in found["rounds"]}
    return {**rates, **{name: why for name, why in found["not_measured"].items() if name not in peers.PEERS}}


def run(args: argparse.Namespace, loader: Loader, sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Return tokens per second of each --peer, of this project offline, and of transformers, or why there are none."""
    result = named(args, sizes) if args.peer else {}
    keep(result)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return {**result, "transformers": "not installed: pip install transformers"}
    ours = gpu_serving.engine(loader, "dynamic", sizes.burst, sizes.burst, args.seed)
    result["effective-batching dynamic"] = ours["engine"]
    keep(result)
    clear()  # the peers need the memory of our pages
    burst = [(seq.prompt_ids, seq.max_tokens) for seq in gpu_serving.sequences_of(loader, sizes.burst, args.seed)]
    config = AutoConfig.for_model(**{**loader.resolved.config, "bos_token_id": 0, "eos_token_id": 0})
    new_model: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = new_model(config).to(loader.device, loader.dtype).eval()
    for name, rate_of in (("static generate", static), ("continuous batching", continuous), ("static cache", compiled)):
        try:
            result[f"transformers {name}"] = rate_of(model, burst)
        except Exception as error:  # a failure of a peer must not cost our own figures
            result[f"transformers {name}"] = f"failed: {type(error).__name__}: {error}"
        keep(result)
    return result


def static(model: Any, burst: Burst) -> float:
    """Return useful tokens per second of one batch, padded on the left, that runs until the longest is done."""
    hugging_face.static(model, burst, most=2)
    began = time.perf_counter()
    hugging_face.static(model, burst)
    return sum(tokens for _, tokens in burst) / (time.perf_counter() - began)


def compiled(model: Any, burst: Burst) -> float:
    """Return the rate of `static` with a static cache, for which the first of two runs compiles the model on a GPU."""
    for _ in range(2):  # with the same lengths, since it compiles for each size of the cache
        began = time.perf_counter()
        hugging_face.static(model, burst, cache="static")
    return sum(tokens for _, tokens in burst) / (time.perf_counter() - began)


def continuous(model: Any, burst: Burst) -> float:
    """Return tokens per second of transformers' own continuous batching."""
    with hugging_face.continuous(model, max(tokens for _, tokens in burst)) as manager:
        hugging_face.answers(manager, burst[:2], "warm")
        began = time.perf_counter()
        tokens = hugging_face.answers(manager, burst)
        return tokens / (time.perf_counter() - began)
