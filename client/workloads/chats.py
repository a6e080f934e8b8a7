"""Chats whose answers end where the model ends them: single messages, conversations, and the first messages of a ShareGPT file.

The length of such an answer is the model's, so the simulator cannot know it before a run. This module must not know how
a message is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TypeVar

from batch_files import sharegpt as sharegpt_files

from ..data import Call, Chat
from . import corpus, messages
from .sample import Draw, Sample
from .traces import skipped

T = TypeVar("T")
QUESTION_TOKENS = 32  # at most, of a follow-up question with its part of the chat template
START_TOKENS = 192  # at most, of the first message and the template's own system message
FEWEST_TOKENS = 16
INSTRUCTIONS = 128  # tokens that all agents of a run begin with
TOOL_SECONDS = (1.0, 4.0, 20.0)  # in which an agent's tools answer at the latest; a call takes a fifth of it or more


def chat(draw: Draw, cap: int = 0) -> list[Sample]:
    """Short user messages, one per chat; the model ends its answers (CAP: after CAP tokens at the latest)."""
    how = Chat(capped=cap > 0)
    return [Sample(text, cap, chat=how) for text in _shuffled(draw, messages.openings(), draw.count)]


def multi_turn(draw: Draw, turns: int = 8, think: int = 0) -> list[Sample]:
    """Conversations of T (8) turns: each follows the model's real answer to the last one, Z (0) seconds later."""
    # An equal share of the context for every answer, so that the last turn fits it, too.
    cap = (draw.context - START_TOKENS - QUESTION_TOKENS * (turns - 1)) // turns
    if cap < FEWEST_TOKENS:
        raise ValueError(
            f"multi-turn:{turns} leaves {max(cap, 0)} of the context's {draw.context:,} tokens for each answer, but needs "
            f"{FEWEST_TOKENS}. Use fewer turns"
        )
    samples: list[Sample] = []
    for number, opening in enumerate(_shuffled(draw, messages.openings(), -(-draw.count // turns))):
        chosen = draw.rng.choice(len(messages.FOLLOW_UPS), turns - 1, replace=turns > len(messages.FOLLOW_UPS))
        for turn, text in enumerate([opening, *(messages.FOLLOW_UPS[i] for i in chosen)], 1):
            after = len(samples) - 1 if turn > 1 else None
            before = () if after is None else (after,)
            call = Call(before, float(think) if before else 0.0, after, len(corpus.split(text)), cap)
            samples.append(Sample(text, cap, f"chat-{number}", chat=Chat(True, turn), call=call))
    return samples[: draw.count]


def agent(draw: Draw, turns: int = 8) -> list[Sample]:
    """Agents of up to T (8) turns: each turn adds the result of a tool to the conversation so far."""
    share = (draw.context - INSTRUCTIONS - START_TOKENS) // turns - QUESTION_TOKENS
    if share < 2 * FEWEST_TOKENS:
        raise ValueError(
            f"agent:{turns} leaves {max(share, 0)} of the context's {draw.context:,} tokens for each turn, but needs "
            f"{2 * FEWEST_TOKENS}. Use fewer turns"
        )
    answer, result = share // 3, share // 3  # a word of a result may be two tokens
    instructions = draw.corpus.piece(draw.rng, INSTRUCTIONS)
    samples: list[Sample] = []
    number = 0
    while len(samples) < draw.count:
        pause, last = 0.0, int(draw.rng.integers(1, turns + 1))
        for turn in range(1, last + 1):
            words = int(draw.rng.integers(result // 2, result + 1))
            text = draw.corpus.piece(draw.rng, words)
            longest = float(draw.rng.choice(TOOL_SECONDS)) if turn < last else 0.0
            asked, name = int(draw.rng.integers(answer // 2, answer + 1)), f"agent-{number}"
            before = (len(samples) - 1,) if turn > 1 else ()
            call = Call(before, pause, before[0] if before else None, words, asked, longest, name, name)
            text = text if before else f"{instructions} {text}"
            samples.append(Sample(text, asked, name, chat=Chat(True, turn), call=call))
            pause = longest * float(draw.rng.uniform(0.2, 1.0))
        number += 1
    return samples[: draw.count]


def _shuffled(draw: Draw, known: Sequence[T], count: int) -> Iterator[T]:
    """Yield this many in random order; none comes again before all others have come."""
    order = chain.from_iterable(draw.rng.permutation(len(known)) for _ in repeat(None))
    return (known[i] for i in islice(order, count))


def sharegpt(path: Path, draw: Draw) -> tuple[list[Sample], list[str]]:
    """Return the first user messages of a ShareGPT file in random order, and notes for the user.

    `num_tokens` is the length of the recorded answer, which only the simulator uses.
    """
    turns, bad = sharegpt_files.read(path)
    samples = [Sample(question, len(corpus.split(answer)), chat=Chat()) for question, answer in turns]
    notes = skipped(bad, len(samples), "entries")
    if draw.count > len(samples):
        notes.append(f"the file has {len(samples):,} conversations, which are repeated to get {draw.count:,} requests")
    return list(_shuffled(draw, samples, draw.count)), notes
