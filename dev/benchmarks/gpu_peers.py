"""The rates of transformers on the same requests: its continuous batching, and one padded static batch.

Its model has random weights of the same shape, as the cost of a step does not depend on them. Decoding is greedy, and
every answer has the requested length. Rates are useful tokens per second, without loading and warm-up.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

from dev.benchmarks import offline
from dev.benchmarks.gpu_loader import Keep, Loader, Sizes
from dev.benchmarks.peers import hugging_face
from dev.benchmarks.peers.hugging_face import Burst
from generate.params import GREEDY
from generate.runner import Runner
from scheduling.sequence import Sequence


def requests(vocabulary: int, sizes: Sizes) -> Burst:
    """Return prompts of 8 to 64 tokens with about `sizes.tokens` tokens to answer, like the client's burst."""
    rng = random.Random(1)
    return [
        ([rng.randrange(vocabulary) for _ in range(rng.randrange(8, 65))],
         max(1, min(2 * sizes.tokens, round(rng.gauss(sizes.tokens, sizes.tokens / 3)))))
        for _ in range(sizes.burst)
    ]  # fmt: skip


def run(loader: Loader, sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Return tokens per second of this project, offline, and of transformers, or the reason for none."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        return {"transformers": "not installed: pip install transformers"}
    runner = loader.runner(sizes.burst * (64 + 2 * sizes.tokens + loader.page_size), sizes.burst)
    burst = requests(loader.shape.vocab_size, sizes)
    result: dict[str, Any] = {"effective-batching dynamic": ours(runner, burst)}
    keep(result)
    del runner
    gc.collect()  # the runner is part of reference cycles, and the peers need the memory of its pages
    config = AutoConfig.for_model(**{**loader.resolved.config, "bos_token_id": 0, "eos_token_id": 0})
    new_model: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = new_model(config).to(loader.device, loader.dtype).eval()
    for name, rate_of in (("static generate", static), ("continuous batching", continuous)):
        try:
            result[f"transformers {name}"] = rate_of(model, burst)
        except Exception as error:  # a failure of a peer must not cost our own figures
            result[f"transformers {name}"] = f"failed: {type(error).__name__}: {error}"
        keep(result)
    return result


def ours(runner: Runner, burst: Burst) -> float:
    """Return tokens per second of the dynamic policy, all requests at once."""
    rates = []
    for _ in range(2):
        sequences = [Sequence(ids, tokens, sampling=GREEDY) for ids, tokens in burst]
        began = time.perf_counter()
        offline.serve(runner, sequences, "dynamic", len(burst))
        rates.append(sum(n for _, n in burst) / (time.perf_counter() - began))
    return max(rates)


def static(model: Any, burst: Burst) -> float:
    """Return useful tokens per second of one batch, padded on the left, that runs until the longest is done."""
    hugging_face.static(model, burst, most=2)
    began = time.perf_counter()
    hugging_face.static(model, burst)
    return sum(tokens for _, tokens in burst) / (time.perf_counter() - began)


def continuous(model: Any, burst: Burst) -> float:
    """Return tokens per second of transformers' own continuous batching."""
    with hugging_face.continuous(model, max(tokens for _, tokens in burst)) as manager:
        hugging_face.answers(manager, burst[:2], "warm")
        began = time.perf_counter()
        tokens = hugging_face.answers(manager, burst)
        return tokens / (time.perf_counter() - began)
