"""Requests that no workload of the client has: long-tailed lengths, shared beginnings, and users who wait for their answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from client.data import Call
from client.workloads.catalog import anyscale_outputs
from simulate.rows import Rows
from simulate.workloads import of_calls

NORMAL_P90 = 1.2816  # standard deviations
RARE = 0.008


def draw(spec: str, count: int, rate: float, seed: int) -> Rows:
    """Draw what words such as `prompt:1730:5696 output:415:834 longest:8192 prefixes:20:1000 limit:2048 users:100` say.

    Lengths are log-normal with this median and 90th percentile, together `longest` at most. With `anyscale:1536`, answers are
    Anyscale's of at most 1,536 tokens, and with `rare:45000`, 0.8 % of the prompts have that many. One of 20 `prefixes` of 1,000
    tokens stands before each prompt and names its client; the k-th is 1/k as frequent as the first. `limit` is the `max_tokens` of
    all. Each of `users` sends the next request when its last was answered. With `turns:16:2`, 16 requests are an agent's, whose
    tools take 2 s and whose prompts continue the conversation. Otherwise they come at `rate`, which may be infinite.
    """
    words = {name: [*map(int, rest.split(":"))] for name, _, rest in (word.partition(":") for word in spec.split())}
    rng = np.random.default_rng(seed)
    prompt = _lengths(rng, count, *words["prompt"])
    if "anyscale" in words:
        drawn = anyscale_outputs(rng, count, *words["anyscale"])
    else:
        drawn = _lengths(rng, count, *words["output"])
    if "turns" in words:
        return _agents(prompt.tolist(), drawn.tolist(), *words["turns"])
    if "rare" in words:
        prompt = np.where(rng.random(count) < RARE, words["rare"], prompt)
    number, shared = words.get("prefixes", [1, 0])
    (longest,) = words.get("longest", [1 << 20])
    output = np.minimum(drawn, longest // 2)
    own = np.minimum(prompt, longest - output - shared)
    rows = Rows(np.cumsum(rng.exponential(1 / rate, count)), own + shared, output)
    if shared:
        weights = 1 / np.arange(1, number + 1)
        chosen, ends = rng.choice(number, count, p=weights / weights.sum()), number * shared + np.cumsum(own)
        pieces = zip((chosen * shared).tolist(), (ends - own).tolist(), ends.tolist())  # all tokens by number
        ids = [[*range(k, k + shared), *range(start, end)] for k, start, end in pieces]
        rows = replace(rows, ids=ids, client=[f"prefix-{k}" for k in chosen])
    if "limit" in words:
        rows = replace(rows, limit=[*words["limit"]] * count)
    if "users" in words:
        (users,), sizes = words["users"], zip(rows.prompt.tolist(), output.tolist())
        calls = [Call((i - users,) if i >= users else (), 0.0, None, *size) for i, size in enumerate(sizes)]
        rows = replace(rows, at=np.zeros(count), calls=calls, closed=True)
    return rows


def _agents(fresh: list[int], answers: list[int], turns: int, tool_s: int) -> Rows:
    calls = []
    for i, sizes in enumerate(zip(fresh, answers)):
        before, name = i - 1 if i % turns else None, f"agent-{i // turns}"
        after = () if before is None else (before,)
        calls.append(Call(after, float(tool_s) if after else 0.0, before, *sizes, program=name, session=name))
    return of_calls(calls, instructions=0)


def _lengths(rng: np.random.Generator, count: int, median: int, p90: int) -> np.ndarray:
    lengths: np.ndarray = np.maximum(1, median * (p90 / median) ** (rng.standard_normal(count) / NORMAL_P90))
    return lengths.astype(int)
