"""The original's workloads: prompts, lengths and arrival times, all from one seed.

`PromptData` and its methods keep the names of the original client. The same seed gives the same
prompts, lengths and arrival times, byte for byte. This module must not know how a request is sent
or measured.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from .workloads.arrivals import Arrivals
from .workloads.corpus import USUAL_CONTEXT

# Each of these words is one token for GPT-2's tokenizer and for bard's. Two tokens a word keep prompt + num_tokens
# inside the context for other tokenizers, too.
TOKENS_PER_WORD = 2

NORMAL_MEAN, NORMAL_SD, NORMAL_LOW, NORMAL_HIGH = 100, 33, 1, 200
MIN_WORDS, MAX_WORDS = 8, 64
BUCKETS = tuple(range(5, 150, 5))
BUCKET_SAMPLES = 290
DEFAULT_NUM_TOKENS_RANGE = (1, 25, 100)
RANGE_SELECTIONS = ("range", "random", "descend")
SELECTIONS = ("normal", "buckets", *RANGE_SELECTIONS)

_WORDS = {
    kind: words.split()
    for kind, words in {
        "noun": "king queen lord lady father mother brother sister friend soldier servant wife daughter "
        "night morning winter summer garden castle crown sword letter heart hand eye tongue spirit "
        "shadow fortune honour mercy sorrow silence thunder city market horse death head world hour "
        "power battle fire earth heaven voice soul peace truth star sun moon",
        "adjective": "gentle noble bitter weary merry golden hollow honest cruel sweet cold bright broken "
        "sudden proud humble ancient secret tender wild pale patient strange young",
        "verb": "loves follows keeps leaves knows calls gives bears shows needs makes knew saw heard "
        "found held brought took",
        "place": "house field grave shore court town land sea gate ground prison",
    }.items()
}
# Random sentences: two prompts rarely have the same beginning, so a prefix cache helps no more than with real prompts.
_SENTENCES = (
    "the {adjective} {noun} {verb} the {noun} of the {place}",
    "my {noun} {verb} thy {adjective} {noun} and the {noun} is {adjective}",
    "if the {noun} {verb} us then no {adjective} {noun} can leave the {place}",
    "when {adjective} {noun} and {noun} meet the {place} is {adjective}",
    "come to the {noun} for he {verb} every {noun} in the {place}",
    "what {adjective} {noun} is this that {verb} the {noun} by night",
    "he {verb} the {noun} as the {adjective} {noun} {verb} the {place}",
    "is the {noun} so {adjective} as the {noun} that {verb} a {noun}",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """Options of a request sent as a chat message, whose answer ends where the model ends it.

    If `capped`, the request's num_tokens are its max_tokens; otherwise it has none.
    """

    capped: bool = False
    turn: int = 1


class Call(NamedTuple):
    """A request that waits for others, which are known by their indices: a call of a program that begins `at`, or a turn of a chat.

    It is sent `tool_s` seconds after all calls `after` are answered. Its prompt is the conversation of call `on` (None: the run's
    instructions) with its answer, and then `fresh` tokens of its own. Its `session` may go on for `keep_s` seconds after it. A
    turn of a chat that people write has no `program`.
    """

    after: tuple[int, ...]
    tool_s: float
    on: int | None
    fresh: int
    answer: int
    keep_s: float = 0.0
    program: str = ""
    session: str = ""
    at: float = 0.0

    def within(self, run: str) -> "Call":
        """Return the call with names of one run, in ASCII and short enough for a header and for our servers."""
        program, session = (f"{ascii(name)[1:-1][:240]}-{run}" if name else "" for name in (self.program, self.session))
        return self._replace(program=program, session=session)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a run; `at` is in seconds after the start.

    A request that waits for others has no time of its own, but that at which their program or chat begins.
    """

    index: int
    at: float
    prompt: str
    num_tokens: int
    user: str = ""
    chat: Chat | None = None
    call: Call | None = None

    @property
    def program(self) -> str:
        """The name of the program of which the request is a call; "" without one."""
        return self.call.program if self.call else ""

    @property
    def is_first(self) -> bool:
        """Whether the request waits for no other."""
        return not (self.call and self.call.after)

    @property
    def due(self) -> float:
        """When a request that waits for no other is sent: its tool may run first."""
        return self.at + (self.call.tool_s if self.call else 0.0)


class PromptData:
    """The samples `(prompt, num_tokens)` of a run; any thread may take the next one."""

    def __init__(
        self,
        num_samples: int,
        num_tokens_range: Sequence[int] | None = None,
        selection: str = "normal",
        seed: int | np.random.SeedSequence | np.random.Generator | None = None,
        context: int = USUAL_CONTEXT,
    ) -> None:
        self.context = context
        self.prompts: list[tuple[str, int]] = []
        self.prompt_idx = 0
        self.prompt_idx_lock = Lock()
        self._rng = np.random.default_rng(seed)
        self.generate_samples(num_samples, num_tokens_range, selection)

    def get_next_sample(self) -> tuple[str, int] | None:
        """Return the next `(prompt, num_tokens)`, or None at the end."""
        with self.prompt_idx_lock:
            if self.prompt_idx >= len(self.prompts):
                return None
            self.prompt_idx += 1
            return self.prompts[self.prompt_idx - 1]

    def generate_samples(
        self, num_samples: int, num_tokens_range: Sequence[int] | None = None, selection: str = "normal"
    ) -> None:
        """Add samples by one of `SELECTIONS`."""
        lengths = DEFAULT_NUM_TOKENS_RANGE if num_tokens_range is None else num_tokens_range
        ways: dict[str, Callable[[], None]] = {
            "normal": lambda: self.generate_samples_normal(num_samples),
            "buckets": lambda: self.generate_samples_buckets(num_samples),
            "range": lambda: self.generate_samples_range(num_samples, lengths),
            "random": lambda: self._generate_samples_random(num_samples, lengths),
            "descend": lambda: self._generate_samples_random(num_samples, lengths, descend=True),
        }
        if selection not in ways:
            raise ValueError(f"unknown selection {selection!r}. Use one of {', '.join(SELECTIONS)}")
        ways[selection]()

    def generate_samples_normal(self, num_samples: int) -> None:
        """Add lengths from a normal distribution (mean 100, sd 33) and prompts of 8 to 64 words.

        The distribution is truncated to 1..200: values outside are drawn again, so that they do not pile up at the
        bounds.
        """
        lengths = redrawn(lambda n: self._rng.normal(NORMAL_MEAN, NORMAL_SD, n), num_samples, NORMAL_LOW, NORMAL_HIGH)
        words = self._rng.integers(MIN_WORDS, MAX_WORDS + 1, num_samples)
        for num_tokens, num_words in zip(lengths, words):
            self._add(int(num_words), int(num_tokens))

    def generate_samples_range(self, num_samples: int, num_tokens_range: Sequence[int]) -> None:
        """Add lengths drawn from the list; a prompt has as many words as requested tokens.

        A prompt that would not fit the context beside its answer is shortened.
        """
        for num_tokens in self._rng.choice(self._checked(num_tokens_range), num_samples):
            self._add(int(num_tokens), int(num_tokens))

    def generate_samples_buckets(self, num_samples: int = BUCKET_SAMPLES) -> None:
        """Add the lengths 5, 10 ... 145, each equally often (within one), in random order.

        Prompts are all equally long, so that latency differs by the answer's length alone.
        """
        rounds = math.ceil(num_samples / len(BUCKETS))
        deck = np.concatenate([self._rng.permutation(BUCKETS) for _ in range(rounds)])
        for num_tokens in self._rng.permutation(deck[:num_samples]):
            self._add(MIN_WORDS, int(num_tokens))

    def _generate_samples_random(
        self, num_samples: int, num_tokens_range: Sequence[int], descend: bool = False
    ) -> None:
        """Add short prompts with lengths drawn from the list; `descend` puts the longest first."""
        lengths = self._rng.choice(self._checked(num_tokens_range), num_samples)
        for num_tokens in sorted(lengths, reverse=True) if descend else lengths:
            self._add(MIN_WORDS, int(num_tokens))

    def _add(self, num_words: int, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self.context - TOKENS_PER_WORD)
        room = (self.context - num_tokens) // TOKENS_PER_WORD
        self.prompts.append((self._prompt(min(num_words, room)), num_tokens))

    def _checked(self, num_tokens_range: Sequence[int]) -> list[int]:
        if not num_tokens_range:
            raise ValueError("num_tokens_range is empty. Use a range such as 10 20 40")
        most = self.context - TOKENS_PER_WORD
        for num_tokens in num_tokens_range:
            if not 1 <= num_tokens <= most:
                raise ValueError(
                    f"num_tokens_range has {num_tokens}, but lengths must be from 1 to {most}. "
                    f"Use lengths that leave room for a prompt in the context of {self.context} tokens"
                )
        return [int(num_tokens) for num_tokens in num_tokens_range]

    def _prompt(self, num_words: int) -> str:
        words: list[str] = []
        while len(words) < num_words:
            for word in self._pick(_SENTENCES).split():
                words.append(self._pick(_WORDS[word[1:-1]]) if word[0] == "{" else word)
        return " ".join(words[:num_words]).capitalize()

    def _pick(self, choices: Sequence[str]) -> str:
        return choices[int(self._rng.integers(len(choices)))]


def plan(
    num_samples: int,
    num_tokens_range: Sequence[int] | None,
    selection: str,
    arrivals: Arrivals,
    seed: int,
    context: int = USUAL_CONTEXT,
) -> list[Planned]:
    """Draw a run from one seed.

    Prompts and arrivals have separate generators, so that another rate sends the same prompts.
    """
    prompt_seed, arrival_seed = np.random.SeedSequence(seed).spawn(2)
    data = PromptData(num_samples, num_tokens_range, selection, prompt_seed, context)
    times = arrivals.times(num_samples, np.random.default_rng(arrival_seed))
    return [Planned(i, at, *sample) for i, (at, sample) in enumerate(zip(times, data.prompts))]


def redrawn(lengths: Callable[[int], np.ndarray], count: int, lowest: int, highest: int) -> np.ndarray:
    """Draw `count` rounded lengths, again where they are outside the bounds, so that none piles up at a bound."""
    drawn: np.ndarray = np.rint(lengths(count))
    while (outside := (drawn < lowest) | (drawn > highest)).any():
        drawn[outside] = np.rint(lengths(int(outside.sum())))
    return drawn.astype(int)


def trace_sha256(trace: Sequence[Planned]) -> str:
    """Return a hash of a run: equal exactly if prompts, lengths, times and users are equal."""
    rows = [[p.at, p.prompt, p.num_tokens, p.user] if p.user else [p.at, p.prompt, p.num_tokens] for p in trace]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
