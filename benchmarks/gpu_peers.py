"""What transformers does with the same requests: its continuous batching, and one padded static batch.

Its model has random weights of the same shape: what a step costs does not depend on the numbers. Greedy, every
answer of the length that was asked for; useful tokens a second, with loading and warm-up left out.
"""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING, Any

import torch

from generate.params import GREEDY
from generate.runner import Runner
from policies import get_policy
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

if TYPE_CHECKING:
    from benchmarks.gpu import Keep, Loader, Sizes

Requests = list[tuple[list[int], int]]
SECONDS = 120.0  # after which a peer that does not answer is given up


def requests(vocabulary: int, sizes: Sizes) -> Requests:
    """Return prompts of 8 to 64 tokens with about `sizes.tokens` tokens to answer, as the client's burst has them."""
    rng = random.Random(1)
    return [
        ([rng.randrange(vocabulary) for _ in range(rng.randrange(8, 65))],
         max(1, min(2 * sizes.tokens, round(rng.gauss(sizes.tokens, sizes.tokens / 3)))))
        for _ in range(sizes.burst)
    ]  # fmt: skip


def run(loader: Loader, sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Return tokens a second of this project, offline, and of transformers, or why there are none."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return {"transformers": "not installed: pip install transformers"}
    runner = loader.runner(sizes.burst * (64 + 2 * sizes.tokens + loader.page_size), sizes.burst)
    shape = runner.config
    asked = requests(shape.vocab_size, sizes)
    result: dict[str, Any] = {"effective-batching dynamic": ours(runner, asked)}
    keep(result)
    del runner
    gc.collect()  # it is part of circles, and its pages make room for the peers
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.block_size, n_embd=shape.n_embd,
        n_layer=shape.n_layer, n_head=shape.n_head, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(loader.device, loader.dtype).eval()
    for name, way in (("static generate", static), ("continuous batching", continuous)):
        try:
            result[f"transformers {name}"] = way(model, asked)
        except Exception as error:  # another's code must not cost our own figures
            result[f"transformers {name}"] = f"failed: {type(error).__name__}: {error}"
        keep(result)
    return result


def ours(runner: Runner, asked: Requests) -> float:
    """Return tokens a second of the dynamic policy, all requests there at once."""
    rates = []
    for _ in range(2):
        pool = PagePool(runner.keys.shape[1], runner.page_size, prefix_cache=False)
        scheduler = Scheduler(get_policy("dynamic", max_batch_size=len(asked)), pool, 2048)
        for ids, tokens in asked:
            scheduler.add(Sequence(ids, tokens, sampling=GREEDY))
        began = time.perf_counter()
        while not scheduler.is_idle:
            scheduler.step(runner.forward, lambda: 0.0)
        rates.append(sum(n for _, n in asked) / (time.perf_counter() - began))
    return max(rates)


@torch.inference_mode()
def static(model: Any, asked: Requests) -> float:
    """Return useful tokens a second of one batch, padded on the left, that runs until the longest is done."""
    longest = max(len(ids) for ids, _ in asked)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in asked], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in asked], device=model.device)
    most = max(tokens for _, tokens in asked)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
    began = time.perf_counter()
    out = model.generate(ids, max_new_tokens=most, min_new_tokens=most, **options)
    out.cpu()
    return sum(tokens for _, tokens in asked) / (time.perf_counter() - began)


def continuous(model: Any, asked: Requests) -> float:
    """Return tokens a second of transformers' own continuous batching."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0,
                              max_new_tokens=max(tokens for _, tokens in asked))  # fmt: skip
    with model.continuous_batching_context_manager(generation_config=config, timeout=10) as manager:
        _answer(manager, asked[:2], "warm")
        began = time.perf_counter()
        tokens = _answer(manager, asked, "request")
        return tokens / (time.perf_counter() - began)


def _answer(manager: Any, asked: Requests, name: str) -> int:
    """Return how many tokens came back for all requests; RuntimeError when they do not."""
    for i, (ids, count) in enumerate(asked):
        manager.add_request(ids, request_id=f"{name}{i}", max_new_tokens=count)
    done = tokens = 0
    end = time.monotonic() + SECONDS
    while done < len(asked):
        answer = manager.get_result(timeout=1)
        if answer is not None and answer.is_finished():
            done, tokens = done + 1, tokens + len(answer.generated_tokens)
        elif time.monotonic() > end:
            raise RuntimeError(f"{done} of {len(asked)} answers after {SECONDS:g} s")
    return tokens
