"""How bard is trained: the network in bfloat16 with its gradients, the batches, and the steps.

The network computes in bfloat16 and is updated in float32. On a CPU half of the time would go into what is not a
matrix: dropout draws bytes, windows of up to 256 tokens attend by plain products (the gradients of PyTorch's flash
attention take five times as long), and the loss is computed 512 tokens at a time, in the cache.

It must not know files or command lines beyond the settings in `args`.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from models.gpt2 import GPT, CausalSelfAttention
from terminal.progress import Reporter, State, remaining


class Dropout(torch.nn.Module):
    """nn.Dropout with random bytes: on a CPU, drawing a float for each element takes as long as the matrices.

    `p` is rounded to a 256th.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropped = round(p * 256)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.dropped:
            return x
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device)
        drawn = words.random_(-(2**63), None).view(torch.uint8)[: x.numel()].view(x.shape)
        return x * (drawn >= self.dropped) * (256 / (256 - self.dropped))


class ShortAttention(torch.autograd.Function):
    """Causal attention of (N, T, D) queries, keys and values by plain products: for short T on a CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
        T = q.shape[1]
        future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        probabilities = torch.softmax(torch.baddbmm(future, q, k.transpose(1, 2), alpha=scale), dim=-1)
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.scale = scale
        return torch.bmm(probabilities, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, probabilities = ctx.saved_tensors
        grad_p = torch.bmm(grad, v.transpose(1, 2))
        grad_s = torch._softmax_backward_data(grad_p, probabilities, -1, q.dtype) * ctx.scale
        grad_v = torch.bmm(probabilities.transpose(1, 2), grad)
        return torch.bmm(grad_s, k), torch.bmm(grad_s.transpose(1, 2), q), grad_v, None


def attend(attention: CausalSelfAttention, x: Tensor) -> Tensor:
    """Return `attention.forward`, computed by ShortAttention where that is faster."""
    B, T, C = x.shape
    if T > 256 or x.is_cuda:
        return CausalSelfAttention.forward(attention, x)
    H = attention.n_head
    parts = attention.c_attn(x).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)  # (B, T, 3C) -> (3, B, H, T, D)
    q, k, v = parts.reshape(3, B * H, T, C // H).unbind(0)  # 3 of (B * H, T, D)
    apply: Callable[..., Tensor] = ShortAttention.apply
    y = apply(q, k, v, attention.scale).view(B, H, T, C // H)
    out: Tensor = attention.resid_dropout(attention.c_proj(y.transpose(1, 2).reshape(B, T, C)))  # (B, T, C)
    return out


def for_training(model: GPT) -> GPT:
    """Return the bfloat16 copy of `model` that computes losses and gradients."""
    twin = copy.deepcopy(model).bfloat16()
    for module in list(twin.modules()):
        if isinstance(module, CausalSelfAttention):
            module.forward = partial(attend, module)  # type: ignore[method-assign]
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, Dropout(child.p))
    return twin.train()


def loss_and_gradients(twin: GPT, x: Tensor, y: Tensor, position: int, rows: int = 512) -> float:
    """Leave gradients in `twin`; return the mean loss in nats per token. The logits exist for `rows` tokens at a time."""
    hidden = twin.hidden(x, position)  # (B, T, C)
    leaf = hidden.detach().requires_grad_()
    total = 0.0
    parts = zip(torch.split(leaf.flatten(0, 1), rows), torch.split(y.flatten(), rows), strict=True)
    for states, targets in parts:
        loss = F.cross_entropy(twin.lm_head(states).float(), targets, reduction="sum") / y.numel()
        torch.autograd.backward(loss, retain_graph=True)
        total += loss.item()
    torch.autograd.backward(hidden, leaf.grad)
    return total


class Progress:
    """The completed share of the training, in steps or in minutes."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.step = 0
        self.began = time.perf_counter()
        self._steps = steps
        self._seconds = minutes and minutes * 60

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def share(self) -> float:
        if self._seconds:
            return self.seconds / self._seconds
        return self.step / self._steps if self._steps else 1.0


def encode(tokenizer: Tokenizer, text: str, dropout: float | None = None) -> Tensor:
    """Encode `text`; each merge is skipped with probability `dropout`."""
    tokenizer.model.dropout = dropout
    ids = tokenizer.encode(text).ids
    tokenizer.model.dropout = None
    return torch.tensor(ids)


def batches(
    tokenizer: Tokenizer, text: str, args: argparse.Namespace, progress: Progress
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (ids, targets, position) of `--tokens-per-step` tokens for each step until the end of the training.

    One step in four has the whole context of 1,024; the others have windows of 256, half of them at a
    random position, so that late positions are learned as well as early ones.
    """
    rng = random.Random(args.seed)
    data = torch.empty(0, dtype=torch.long)
    used = 0
    while progress.share < 1:
        if used >= len(data) - 1:
            share = min(1.0, max(0.0, (0.95 - progress.share) / 0.25))
            data = encode(tokenizer, text, args.bpe_dropout * share or None)
            used = 0
        T = 1024 if progress.step % 4 == 3 else 256
        starts = [rng.randrange(len(data) - T - 1) for _ in range(args.tokens_per_step // T)]
        window = torch.stack([data[s : s + T + 1] for s in starts])
        used += args.tokens_per_step
        position = rng.randrange(1024 - T + 1) if T < 1024 and progress.step % 2 else 0
        yield window[:, :-1], window[:, 1:], position
        progress.step += 1


@torch.no_grad()
def bits_per_byte(model: GPT, ids: Tensor, n_bytes: int, stride: int) -> float:
    """Return the loss of `ids` in bits per byte; each token sees at least the `1024 - stride` before it, if there are."""
    model.eval()
    nats, done = 0.0, 0
    while done < len(ids) - 1:
        end = min(done + stride if done else 1024, len(ids) - 1)
        start = max(0, end - 1024)
        targets = ids[start + 1 : end + 1].clone()
        targets[: done - start] = -1  # counted in an earlier window
        with torch.autocast(ids.device.type, torch.bfloat16):
            _, loss = model(ids[None, start:end], targets[None])
        nats += float(loss) * (end - done)
        done = end
    return nats / math.log(2) / n_bytes


def learning_rate(progress: Progress, args: argparse.Namespace) -> float:
    """Rise over 50 steps, stay until 40 % of the run, then fall in a straight line."""
    peak: float = args.lr
    return peak * min((progress.step + 1) / 50, 1.0, 0.01 + 0.99 * (1 - progress.share) / 0.6)


def optimizers(model: GPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if ".h." in n and p.dim() == 2]
    tables = [model.transformer.wte.weight, model.transformer.wpe.weight]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True),
    ]


def train(model: GPT, tokenizer: Tokenizer, text: str, held_out: str, args: argparse.Namespace) -> Progress:
    """Train until the steps or the minutes are over; return the progress."""
    progress = Progress(args.steps, args.minutes)
    both = optimizers(model, args)
    twin = for_training(model)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    ids = encode(tokenizer, held_out).to(args.device)
    sample = ids[: len(ids) // 4]
    sample_bytes = len(tokenizer.decode(sample.tolist()).encode())
    loss = math.nan

    def state() -> State:
        text = f"step {progress.step:,}, {progress.share:.1%}, loss {loss:.3f}"
        if progress.share:
            text += f", ETA {remaining(progress.share, 1, progress.seconds)}"
        return State(progress.share, 1, text)

    console = Console(stderr=True)
    with Reporter(console, state):
        for x, y, position in batches(tokenizer, text, args, progress):
            for group in (group for optimizer in both for group in optimizer.param_groups):
                group["lr"] = learning_rate(progress, args)
            loss = loss_and_gradients(twin, x.to(args.device), y.to(args.device), position)
            for parameter, computed in pairs:
                parameter.grad = None if computed.grad is None else computed.grad.float()
            twin.zero_grad(set_to_none=True)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in both:
                optimizer.step()
            for parameter, computed in pairs:
                computed.data.copy_(parameter.data)
            if progress.step % 300 == 299:
                held = bits_per_byte(model, sample, sample_bytes, 512)
                console.print(f"step {progress.step + 1:,}, held-out sample {held:.4f} bits/byte", highlight=False)
    return progress


def average(model: GPT, others: list[dict[str, Tensor]]) -> None:
    """Set each weight of `model` to the mean of its own and those of the `others`."""
    for name, parameter in model.named_parameters():
        same = [parameter.data, *(other[name].to(parameter) for other in others)]
        parameter.data = torch.stack(same).mean(0)
