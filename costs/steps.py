"""The sums of one step that cost models charge for: of a plan, of a recorded step, of a step of round numbers.

This module must not know what a step costs, or where a record comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice, repeat
from types import MappingProxyType
from typing import NamedTuple

from scheduling.iteration import Member, Members, Plan


class Step(NamedTuple):
    """The sums of one step that cost models charge for.

    A held row of a padded plan is a decoding row; a padded prefill has rows x longest prompt tokens.
    """

    decodes: int = 0  # rows that decode
    context: int = 0  # their contexts (prompt + tokens so far), summed
    prefills: int = 0  # rows that compute prompt tokens
    prompt: int = 0  # prompt tokens computed, padding among them
    pairs: float = 0.0  # attention pairs of the chunks: c (k + (c + 1) / 2) for c tokens after k cached
    squares: int = 0  # the squares of the chunks' lengths, summed
    longest: int = 0  # the longest row so far, in tokens
    widest: int = 0  # the most tokens that one row computes
    work: int = 0  # row length x tokens computed, summed over the rows
    masks: int = 0  # tokens sampled under the mask of a grammar, drafts among them

    @property
    def rows(self) -> int:
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """Rows of the linear layers."""
        return self.decodes + self.prompt


def decoding(rows: int, context: int, longest: int = 0) -> Step:
    """Return the step in which `rows` rows of `context` tokens together decode one token each."""
    return Step(rows, context, 0, 0, 0.0, 0, longest, 1 if rows else 0, context)


def prefilling(*prompts: int, cached: int = 0) -> Step:
    """Return the step that computes whole prompts, each after `cached` tokens found in the cache."""
    return _sum(((False, prompt - cached, prompt) for prompt in prompts), 0)


def _sum(rows: Iterable[tuple[bool, int, int]], padding: int, masks: int = 0) -> Step:
    """Sum rows: whether each decodes, the tokens that it computes, and its length behind them."""
    decodes = context = prefills = squares = longest = widest = work = 0
    prompt, pairs = padding, 0.0
    for is_decode, count, length in rows:
        if is_decode:
            decodes += count
            context += length
        else:
            prefills += 1
            prompt += count
            pairs += count * (length - count + (count + 1) / 2)
            squares += count * count
        work += length * count
        longest = max(longest, length)
        widest = max(widest, 1 if is_decode else count)
    return Step(decodes, context, prefills, prompt, pairs, squares, longest, widest, work, masks)


def step_of(plan: Plan) -> Step:
    """Sum a plan; held rows of an unpadded plan are not computed and cost nothing.

    A draft token is one more row that decodes, but the keys and values of its sequence are read once for all its rows.
    """
    known, masks, rows = plan.decoding, 0, list[tuple[bool, int, int]]()
    for seq, count, drafts in islice(zip(plan.sequences, plan.counts, plan.drafts or repeat(())), known, None):
        if seq.constrained and count >= seq.pending:
            masks += count if drafts else 1
        rows.append((bool(drafts) or (count == 1 and bool(seq.output_ids)), count, seq.computed + count))
    if plan.padded:
        rows += [(True, 1, seq.computed + 1) for seq in plan.held]
    if not known:
        return _sum(rows, plan.padding, masks)
    # Most rows of most steps, which are known to decode one token.
    lengths = [seq.computed for seq in plan.sequences[:known]]
    masks += [seq.constrained for seq in plan.sequences[:known]].count(True)
    step = decoding(known, sum(lengths) + known, max(lengths) + 1)._replace(masks=masks)
    if not rows:
        return step
    rest = _sum(rows, plan.padding, masks)
    return rest._replace(
        decodes=rest.decodes + known, context=rest.context + step.context, longest=max(rest.longest, step.longest),
        widest=max(rest.widest, 1), work=rest.work + step.work,
    )  # fmt: skip


def step_of_members(
    members: Iterable[Member], padded: bool, constrained: Mapping[str, int] = MappingProxyType({})
) -> Step:
    """Sum a recorded step as `step_of` sums its plan; `padded` is a property of its policy.

    `constrained` has the prompt length of each constrained request, whose later tokens are sampled under masks. Of a member
    with drafts, `computed` may be a few tokens too small, since the rejected ones are not in it.
    """
    members = members if isinstance(members, Members) else Members.of(members)
    columns = members.columns
    if not constrained and columns.phase.count("decode") == columns.tokens.count(1) == len(columns.id):
        return decoding(len(columns.id), sum(columns.computed), max(columns.computed, default=0))
    rows = [(member.phase != "prefill", member.tokens, member.computed) for member in members if member.tokens]
    masks = sum(
        member.tokens if member.phase == "decode" else 1
        for member in members
        if member.id in constrained and member.tokens and member.computed >= constrained[member.id]
    )
    if not padded:
        return _sum(rows, 0, masks)
    counts = [count for _, count, _ in rows]
    held = [(True, 1, member.computed + 1) for member in members if member.phase == "held"]
    return _sum([*rows, *held], max(counts, default=0) * len(counts) - sum(counts), masks)


def size(step: Step) -> tuple[bool, int]:
    """Return the class of a step: steps of one class take about equally long."""
    return bool(step.prompt), step.tokens.bit_length()


def seen_in(steps: Iterable[Step]) -> dict[str, int]:
    """Return the largest sums of steps that were measured, and the fewest tokens."""
    rows = [(step.decodes, step.prompt, step.context, -step.tokens) for step in steps]
    decodes, prompt, context, least = map(max, zip(*rows or [(0, 0, 0, 0)]))
    return {"decodes": decodes, "prompt": prompt, "context": context, "least": -least}


def beyond(seen: Mapping[str, int], step: Step) -> float:
    """Return how many times larger a step is than all of `seen_in`, or smaller than half of them; above 1: a guess."""
    pairs = ((getattr(step, name), seen[name]) for name in ("decodes", "prompt", "context"))
    times = (size / most if most else math.inf for size, most in pairs if size)
    return max(seen["least"] / 2 / max(1, step.tokens), *times, 0.0)
