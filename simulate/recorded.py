"""What a recorded step is charged for: the sums that a cost model sees, from its record instead of its plan.

It must not know clocks, or where a record comes from.
"""

from __future__ import annotations

from scheduling.iteration import Iteration
from simulate.costs import Step


def step_of_record(record: Iteration, padded: bool) -> Step:
    """Return what `step_of` gives for the plan of this record; `padded` is what its policy says of itself."""
    decodes = context = prefills = prompt = squares = longest = widest = work = 0
    pairs = 0.0
    for member in record.members:
        count, length = member.tokens, member.computed
        if member.phase == "held" and padded:
            count, length = 1, member.computed + 1
        elif not count:
            continue
        if member.phase == "prefill":
            prefills += 1
            prompt += count
            pairs += count * (length - count + (count + 1) / 2)
            squares += count * count
        else:
            decodes += 1
            context += length
        work += length * count
        longest = max(longest, length)
        widest = max(widest, member.tokens)
    if padded:
        counts = [member.tokens for member in record.members if member.tokens]
        prompt += widest * len(counts) - sum(counts)
    return Step(decodes, context, prefills, prompt, pairs, squares, longest, widest, work)


def size(step: Step) -> tuple[bool, int]:
    """Return what steps have in common that take about as long as each other."""
    return bool(step.prompt), step.tokens.bit_length()
