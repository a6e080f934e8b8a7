"""A short text of a form, for models without weights: so that clients can be tested with valid answers.

It looks no further than the next token, so that it may not find, for example, a word that can stand anywhere in a text.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

# The bytes that a short text prefers, in this order.
CLOSING = b'"}])>,:;@./_ =' + bytes(range(48, 58)) + b"-+" + bytes(range(65, 256)) + bytes(range(65))
WORD = "word"  # the content of a string that may be any
LONGEST = 4096  # tokens
MOST_SECONDS = 2.0  # of a processor


def bits_of(matcher: llguidance.LLMatcher) -> NDArray[np.uint8]:
    """Return the mask of the tokens that may follow, a bit for each."""
    return np.frombuffer(matcher.compute_bitmask(), np.uint8)


def depth(text: bytes) -> int:
    """Return how many brackets are open."""
    return max(0, sum(map(text.count, b"[{")) - sum(map(text.count, b"]}")))


def short_text(matcher: llguidance.LLMatcher, tokenizer: Any) -> list[int]:
    """Return a short text from the matcher's place to the end of its form, as ids with the one that ends it.

    Raises ValueError if it takes longer than `MOST_SECONDS`.
    """
    bytes_of = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    singles = [bytes_of[byte] for byte in map(bytes, zip(CLOSING)) if byte in bytes_of]
    closing = list(dict.fromkeys([*tokenizer.eos_ids, *singles]))
    word = tokenizer.encode(WORD)
    ids: list[int] = []
    seen = set()  # masks, each with the number of open brackets: an array ends where its next item looks like the last
    taken: Counter[tuple[bytes, int]] = Counter()  # tokens, by the mask before them
    began = time.thread_time()
    while len(ids) < LONGEST and not matcher.is_error():
        if time.thread_time() - began > MOST_SECONDS:
            raise ValueError(f"a mock model finds no text of it in {MOST_SECONDS:g} s")
        if forced := matcher.compute_ff_tokens():
            matcher.consume_tokens(forced)
            ids += forced
            continue
        text = tokenizer.decode_bytes(ids)
        # For a program that runs a tool, a required string is seldom right when it is empty.
        if text.endswith(b'"') and matcher.validate_tokens(word) == len(word):
            matcher.consume_tokens(word)
            ids += word
            continue
        bits = bits_of(matcher)
        mask, allowed = bits.tobytes(), np.unpackbits(bits, bitorder="little")
        candidates = [token for token in closing if allowed[token]] or [int(allowed.argmax())]
        if candidates[0] in tokenizer.eos_ids:
            return [*ids, candidates[0]]
        seen.add((mask, depth(text)))
        # One that ends the text; or leads to a new place; or, as several places may have one mask, is taken least often.
        after = {token: matcher.deep_copy() for token in candidates}
        possible = [token for token in candidates if after[token].consume_token(token)]
        ends = (token for token in possible if after[token].is_accepting())
        places = ((t, bits_of(after[t]).tobytes(), depth(text + tokenizer.token_bytes(t))) for t in possible)
        leads_on = (token for token, *place in places if tuple(place) not in seen)
        token = next(chain(ends, leads_on, [min(possible, key=lambda token: taken[mask, token])]))
        taken[mask, token] += 1
        ids.append(token)
        matcher = after[token]
    return ids
