"""Checks of the GPU's engine: attention against float64, log probabilities and texts against float32 on the CPU.

In 16 bits a token flips where the two likeliest are nearly equal. So for each text that differs, the first token that
differs is examined: it is a near-tie if the float32 gap between the two tokens is within twice the largest error of a
log probability after a prompt, and otherwise a fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dev.benchmarks import machine as measured
from dev.benchmarks import offline
from dev.benchmarks.gpu_loader import Keep, Loader, Sizes
from generate.gpu import choose
from generate.gpu.attention import DecodeAttention, DecodeRows, TorchDecode
from generate.machine import PAGE_SIZE
from generate.params import GREEDY, SamplingParams
from generate.runner import Runner
from scheduling.iteration import Plan
from scheduling.scheduler import Token
from scheduling.sequence import Sequence

SLOTS = 32


def card(device: torch.device) -> str | None:
    """Return the GPU's name, None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy of 2 GiB moves; on a CPU, those that it reads."""
    if device.type != "cuda":
        return measured.bandwidth()
    source = torch.ones(1 << 29, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large product in this format."""
    if device.type != "cuda":
        return measured.arithmetic_rate(dtype)
    n = 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b)


def _seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Return the shortest of some runs by the GPU's own clock, without the host's launches."""
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    call()
    best = float("inf")
    for _ in range(repeats):
        began, ended = (new_event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1e3)
    return best


def run(loader: Loader, sizes: Sizes, keep: Keep) -> dict[str, Any]:
    """Return the results of all checks."""
    rng = random.Random(1)
    vocabulary = loader.shape.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(4, 80))] for _ in range(sizes.prompts)]
    results: dict[str, Any] = {"attention": attention(loader), "prompts": sizes.prompts, "tokens": sizes.tokens}
    keep(results)
    reference = loader.reference(kv_tokens(prompts, sizes.tokens, PAGE_SIZE))
    expected = texts(reference, prompts, sizes.tokens, "dynamic"), first_logprobs(reference, prompts)
    for mode in ("fast", "strict"):
        if mode == "strict" and loader.device.type != "cuda":
            continue  # hours in the interpreter; tests/generate/test_gpu_runner.py has a smaller case
        runner = loader.runner(kv_tokens(prompts, sizes.tokens, loader.page_size), SLOTS, mode == "strict")
        results[mode] = _texts(runner, reference, prompts, *expected)
        del runner  # the next one needs its memory
        keep(results)
    return results


def attention(loader: Loader) -> dict[str, Any]:
    """Return the decode kernel's largest error against float64, and whether its bits are the same alone."""
    on_gpu = loader.device.type == "cuda"
    shape, dtype = loader.shape, loader.dtype
    size, lengths = (128, [1, 128, 129, 500, 1000]) if on_gpu else (16, [1, 16, 17, 40])
    kv_heads = shape.n_kv_head if on_gpu else 1
    heads, width, n = shape.n_head // shape.n_kv_head * kv_heads, shape.head_size, len(lengths)
    if not on_gpu and heads > kv_heads:
        dtype = torch.float32  # Triton's interpreter cannot multiply bfloat16
    pages = -(-max(lengths) // size)
    pool = 1 + n * pages, kv_heads, size, width
    keys, values = (choose.noise(*pool, seed=i).to(loader.device, dtype) for i in (1, 2))
    qkv = choose.noise(n, (heads + 2 * kv_heads) * width).to(loader.device, dtype)
    block_tables = (torch.arange(n * pages).view(n, pages) + 1).to(loader.device)
    rows = DecodeRows(torch.tensor(lengths, device=loader.device), block_tables)
    try:
        from generate.gpu.triton_attention import TritonDecode

        attend: DecodeAttention = TritonDecode(n, pages, heads, kv_heads, width, loader.device)
    except ImportError:
        attend = TorchDecode()
    out = attend(qkv, keys, values, rows, width**-0.5)
    alone = [attend(qkv[[i]], keys, values, DecodeRows(*(x[[i]] for x in rows)), width**-0.5)[0] for i in range(n)]
    exact = [_exact(qkv[i], (keys, values), block_tables[i], lengths[i]) for i in range(n)]
    error = max(float((row.double() - e).abs().max()) for row, e in zip(out, exact))
    same = all(torch.equal(a, b) for a, b in zip(out, alone))
    return {"kernel": attend.name, "error": error, "same_bits_alone": same}


def _exact(qkv: Tensor, pools: tuple[Tensor, Tensor], table: Tensor, length: int) -> Tensor:
    """Return a row's attention in float64; its new token is already in the pages."""
    _, kv_heads, _, width = pools[0].shape
    k, v = (pool[table].transpose(0, 1).reshape(kv_heads, -1, width)[:, :length].double() for pool in pools)
    q = qkv[: -2 * kv_heads * width].view(kv_heads, -1, width).double()  # (KV, H / KV, D)
    weights = (torch.einsum("kgd,ktd->kgt", q, k) * width**-0.5).softmax(2)
    return torch.einsum("kgt,ktd->kgd", weights, v).flatten()


def texts(runner: Runner, prompts: list[list[int]], tokens: int, policy: str) -> list[list[int]]:
    """Return the greedy texts of the prompts under a policy."""
    sequences = [Sequence(ids, tokens, sampling=GREEDY) for ids in prompts]
    offline.serve(runner, sequences, policy, SLOTS)
    return [seq.output_ids for seq in sequences]


def first_logprobs(runner: Runner, prompts: list[list[int]]) -> Tensor:
    """Return the log probabilities (prompts, V) of every token after each prompt."""
    vocabulary = runner.config.vocab_size
    params = SamplingParams(temperature=0, logprobs=vocabulary)
    rows = torch.empty(len(prompts), vocabulary)
    for row, ids in zip(rows, prompts):
        seq = Sequence(ids, 1, sampling=params)
        seq.pages = list(range(1, 2 + len(ids) // runner.page_size))
        (token,) = runner.forward(Plan(1, 0.0, [seq], [len(ids)]))
        assert isinstance(token, Token)
        where, values = zip(*token.detail.top)
        row[list(where)] = torch.tensor(values)
    return rows


def kv_tokens(prompts: list[list[int]], tokens: int, page_size: int) -> int:
    """Return the number of tokens that need pages."""
    return SLOTS * (max(map(len, prompts)) + tokens + page_size)


def _texts(
    runner: Runner, reference: Runner, prompts: list[list[int]], expected: list[list[int]], logprobs: Tensor
) -> dict[str, Any]:
    tokens = len(expected[0])
    error = float((first_logprobs(runner, prompts) - logprobs).abs().max())
    batch, alone = (texts(runner, prompts, tokens, policy) for policy in ("dynamic", "nobatch"))
    differ = [i for i, (a, b) in enumerate(zip(batch, expected)) if a != b]
    gaps = _gaps(reference, [(prompts[i], expected[i], batch[i]) for i in differ])
    return {
        "dtype": str(runner.dtype).removeprefix("torch."), "logprob_error": error,
        "equal_to_cpu_float32": len(prompts) - len(differ),
        "near_ties": sum(gap <= 2 * error for gap in gaps), "gaps": gaps,
        "equal_alone_and_in_a_batch": sum(a == b for a, b in zip(alone, batch)),
    }  # fmt: skip


def _gaps(reference: Runner, pairs: list[tuple[list[int], list[int], list[int]]]) -> list[float]:
    """Return for each prompt and two texts the float32 gap between the first two tokens that differ."""
    gaps = []
    for prompt, expected, text in pairs:
        at = next(i for i, (a, b) in enumerate(zip(expected, text)) if a != b)
        (logprobs,) = first_logprobs(reference, [prompt + expected[:at]])  # (V)
        gaps.append(float(logprobs[expected[at]] - logprobs[text[at]]))
    return gaps
