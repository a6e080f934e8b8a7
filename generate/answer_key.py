"""When two requests have the same answer: the same tokens are given, and drawn, ended and shown in the same way.

It must not know why anyone asks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Hashable
from typing import Any


def answer_key(inference: Any) -> Hashable:
    """Return a value that is equal for inferences with equal answers, whose scheduling is equal as well.

    Without randomness (temperature 0) the seed does not count. Tenant, client, priority and the seconds in which the
    answer is wanted do, and whether it is background work: a copy must not wait behind a request that a policy serves
    later than it would serve the copy. So do its program, and the fields that an eviction keeps its pages by.
    """
    seq, text, sampling = inference.sequence, inference.text, inference.sequence.sampling
    if sampling.temperature == 0 and sampling.seed:
        sampling = dataclasses.replace(sampling, seed=0)
    return (
        hashlib.sha256(array("q", seq.prompt_ids).tobytes()).digest(),
        inference.num_tokens, inference.scores_prompt, seq.open_ended, seq.cache_salt, sampling, text.rules,
        inference.is_background, inference.tenant, seq.client, seq.priority, inference.deadline,
        seq.session, seq.program, seq.keep_s,
    )  # fmt: skip
