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

import torch

from benchmarks import offline
from benchmarks.gpu_loader import Keep, Loader, Sizes
from generate.params import GREEDY
from generate.runner import Runner
from scheduling.sequence import Sequence

Requests = list[tuple[list[int], int]]  # prompt and number of tokens to answer
SECONDS = 120.0  # timeout of a peer


def requests(vocabulary: int, sizes: Sizes) -> Requests:
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


def ours(runner: Runner, burst: Requests) -> float:
    """Return tokens per second of the dynamic policy, all requests at once."""
    rates = []
    for _ in range(2):
        sequences = [Sequence(ids, tokens, sampling=GREEDY) for ids, tokens in burst]
        began = time.perf_counter()
        offline.serve(runner, sequences, "dynamic", len(burst))
        rates.append(sum(n for _, n in burst) / (time.perf_counter() - began))
    return max(rates)


@torch.inference_mode()
def static(model: Any, burst: Requests) -> float:
    """Return useful tokens per second of one batch, padded on the left, that runs until the longest is done."""
    longest = max(len(ids) for ids, _ in burst)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in burst], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in burst], device=model.device)
    most = max(tokens for _, tokens in burst)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
    began = time.perf_counter()
    out = model.generate(ids, max_new_tokens=most, min_new_tokens=most, **options)
    out.cpu()
    return sum(tokens for _, tokens in burst) / (time.perf_counter() - began)


def continuous(model: Any, burst: Requests) -> float:
    """Return tokens per second of transformers' own continuous batching."""
    from transformers import GenerationConfig

    new_config: Callable[..., Any] = GenerationConfig
    config = new_config(do_sample=False, eos_token_id=-1, pad_token_id=0,
                              max_new_tokens=max(tokens for _, tokens in burst))  # fmt: skip
    with model.continuous_batching_context_manager(generation_config=config, timeout=10) as manager:
        _answer(manager, burst[:2], "warm")
        began = time.perf_counter()
        tokens = _answer(manager, burst, "request")
        return tokens / (time.perf_counter() - began)


def _answer(manager: Any, burst: Requests, name: str) -> int:
    """Return the number of tokens of all answers. Raises RuntimeError for a timeout."""
    for i, (ids, count) in enumerate(burst):
        manager.add_request(ids, request_id=f"{name}{i}", max_new_tokens=count)
    done = tokens = 0
    end = time.monotonic() + SECONDS
    while done < len(burst):
        answer = manager.get_result(timeout=1)
        if answer is not None and answer.is_finished():
            done, tokens = done + 1, tokens + len(answer.generated_tokens)
        elif time.monotonic() > end:
            raise RuntimeError(f"{done} of {len(burst)} answers after {SECONDS:g} s")
    return tokens
