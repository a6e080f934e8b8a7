"""Generation as the original wrote it: one plain call each, no cache, no loop, no thread.

They are slow and easy to trust: the tests compare the serving engine with them. They draw tokens by the engine's own
rule (`sampling.sample`), so the same seed gives the same text. They must not know HTTP, policies or pages.

An inference is any object with `.prompt` and `.num_tokens`; if it has `.data` (token ids), that replaces the prompt's
text. Its `.sampling`, or its `.temperature`, `.top_k`, `.top_p` and `.seed`, say how its tokens are drawn; with none of
these it is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from generate.params import GREEDY, SamplingParams
from generate.sampling import sample
from model import DynamicBatchingServerModel, ServerModel


@torch.no_grad()
def generate_ids(inference: Any, model: ServerModel) -> list[int]:
    """Return the `num_tokens` ids that follow the prompt of one inference."""
    ids = prompt_ids(inference, model)
    start = len(ids)
    for _ in range(inference.num_tokens):
        logits, _ = model.model(torch.tensor([ids], device=model.device))  # (1, 1, V)
        ids += _draw(logits[:, -1], [inference], [len(ids)])
    return ids[start:]


@torch.no_grad()
def generate(inference: Any, model: ServerModel) -> str:
    """Return prompt and completion of one inference."""
    return model.decode(prompt_ids(inference, model) + generate_ids(inference, model))


@torch.no_grad()
def static_batch_generate(batch: Sequence[Any], model: ServerModel) -> list[tuple[str, Any]]:
    """Return (prompt and completion, inference) for all of a batch, when the longest is done.

    Prompts of different lengths are padded on the right. Causal attention never looks there, so the padding costs time
    and changes nothing; a row that is done keeps its place and its cost, without growing.
    """
    if not batch:
        return []
    rows = [prompt_ids(inference, model) for inference in batch]
    ends = [len(row) + inference.num_tokens for row, inference in zip(rows, batch)]
    for _ in range(max(inference.num_tokens for inference in batch)):
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        padded = [row + [0] * (longest - len(row)) for row in rows]
        x = model.model.hidden(torch.tensor(padded, device=model.device))  # (B, T, C)
        last = torch.tensor(lengths, device=model.device) - 1
        logits = model.model.lm_head(x[torch.arange(len(rows), device=model.device), last])
        for row, end, token in zip(rows, ends, _draw(logits, batch, lengths)):
            if len(row) < end:
                row.append(token)
    return [(model.decode(row), inference) for row, inference in zip(rows, batch)]


@torch.no_grad()
def dynamic_batch_generate(next_batch: Sequence[Any], model: DynamicBatchingServerModel) -> tuple[list[Any], list[Any]]:
    """Run one iteration: give every inference its next token, and return (finished, in progress).

    An inference needs `.data` and `add_token(id) -> whether it is done`, as `batching.Inference`
    has them.
    """
    if not next_batch:
        return [], []
    rows = [prompt_ids(inference, model) for inference in next_batch]
    lengths = [len(row) for row in rows]
    logits = model.batch_inference_forward(rows, lengths)  # (n, 1, V)
    finished: list[Any] = []
    in_progress: list[Any] = []
    for inference, token in zip(next_batch, _draw(logits[:, -1], next_batch, lengths)):
        (finished if inference.add_token(token) else in_progress).append(inference)
    return finished, in_progress


def prompt_ids(inference: Any, model: ServerModel) -> list[int]:
    """Return the token ids of an inference so far, copied: `.data`, else the prompt's."""
    data = getattr(inference, "data", None)
    if data is None:
        return list(model.encode(inference.prompt))
    return data.tolist() if isinstance(data, Tensor) else list(data)


def sampling_of(inference: Any) -> SamplingParams:
    """Return how an inference wants its tokens drawn."""
    params: SamplingParams | None = getattr(getattr(inference, "sequence", inference), "sampling", None)
    if params is not None:
        return params
    if getattr(inference, "temperature", None) is None:
        return GREEDY
    return SamplingParams(
        inference.temperature,
        getattr(inference, "top_k", 0),
        getattr(inference, "top_p", 1.0),
        getattr(inference, "seed", 0),
    )


def _draw(logits: Tensor, batch: Sequence[Any], positions: Sequence[int]) -> list[int]:
    """Return a token for each row of logits (R, V). Raises NotFinite for a row that is not finite."""
    tokens: list[int] = []
    for token in sample(logits.float(), [sampling_of(inference) for inference in batch], positions):
        if isinstance(token, Exception):
            raise token
        tokens.append(token)
    return tokens
