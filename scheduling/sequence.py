"""One request on its way through the scheduler: token ids, times, pages and state.

It must not know text, HTTP or how a token is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

State = Literal["waiting", "running", "held", "finished"]
UNKNOWN_TOKEN = (1 << 32) - 1  # an answer's token where no model computes one; no prompt has it, so no prefix is found
# HTTP headers in which clients name the program of a request; the first one counts.
PROGRAM_HEADERS = ("X-Program-Id", "X-Claude-Code-Session-Id")
WAIT_REASONS = ("slots_full", "token_budget", "kv_full", "policy_order", "window")


class Estimate(NamedTuple):
    """When a new request is expected to join the batch, and to have its last token."""

    joins_at: float
    ends_at: float


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the number of tokens to generate, and its progress.

    `stop` is called with each new token and returns a finish reason or None. `sampling` belongs to the model and is not
    read here. Times are seconds of the scheduler's clock.
    """

    prompt_ids: list[int]
    max_tokens: int
    id: str = ""
    arrived_at: float = 0.0
    stop: Callable[[int], str | None] | None = None
    sampling: Any = None
    client: str = ""
    priority: int = 0
    deadline: float | None = None  # when its client needs the whole answer
    open_ended: bool = False  # its client named no length: `max_tokens` is what the context leaves, rarely needed
    answer_tokens: int = 0  # in a simulation, its answer ends after so many, if not 0; only an oracle may look
    adapter: str = ""  # the name of its LoRA adapter, empty for the model alone
    adapter_weights: Any = None  # these belong to the model, as `sampling` does
    session: str = ""  # requests that go on with one another, such as the turns of a chat
    program: str = ""  # requests that serve one task, such as all calls of an agent; sessions are parts of it
    program_tokens: tuple[int, int] = (0, 0)  # in a simulation, its fresh prompt and answer tokens, for an oracle
    program_volume: float = 0.0  # the same: what its calls hold, KV tokens summed over the tokens of their answers
    keep_s: float = 0.0  # for how many seconds after it its client expects to go on
    constrained: bool = False  # its answer follows a grammar: each of its tokens is sampled under a mask
    cache_salt: str = ""  # sequences with other salts never share KV pages
    slots: int = 1  # that it takes at a server that is not ours, one for each of its answers

    estimate: Estimate | None = None  # from when it arrived, if the policy estimates and the time of steps is known
    output_ids: list[int] = field(default_factory=list)
    new_tokens: int = 1  # that `on_token` reports: several at once in front of another server
    details: list[Any] = field(
        default_factory=list
    )  # what the model adds to each output token, such as log probabilities
    prompt_details: list[Any] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the pages
    cached: int = 0  # prompt tokens found in the prefix cache when it first joined
    preemptions: int = 0  # how often it lost its slot
    recompute_until: int = 0  # tokens that were computed before the last preemption, and are recomputed
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    state: State = "waiting"
    finish_reason: str | None = None
    error: BaseException | None = None

    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    first_iteration: int = 0
    last_iteration: int = 0
    batch_sum: int = 0  # sum and maximum of the batch sizes it ran in
    batch_max: int = 0
    drafted: int = 0  # draft tokens, and how many of them were accepted and belong to the answer
    accepted: int = 0
    waited: dict[str, tuple[int, float]] = field(default_factory=dict)  # reason: iterations, seconds

    @property
    def length(self) -> int:
        """Tokens so far: the prompt and the output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def total(self) -> int:
        """The most tokens it can have."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def pending(self) -> int:
        """Known tokens that are not computed: the rest of the prompt, or 1 when decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.computed

    @property
    def is_prefilling(self) -> bool:
        return self.pending > 1 or not self.output_ids

    @property
    def has_progressed(self) -> bool:
        """Whether it decodes, and has generated a token since it last joined."""
        return self.pending == 1 and bool(self.output_ids) and self.computed > self.recompute_until

    def end_after(self, tokens: int) -> None:
        """Let a simulated answer end after `tokens` tokens, if that is before its limit, as the model ended it."""
        if 0 < tokens < self.max_tokens:
            self.answer_tokens = tokens
            self.stop = lambda token: "stop" if len(self.output_ids) >= tokens else None

    @property
    def is_finished(self) -> bool:
        """Whether it has all its tokens; it may still hold its slot."""
        return self.finish_reason is not None

    @property
    def iterations(self) -> int:
        return self.last_iteration - self.first_iteration + 1 if self.first_iteration else 0

    def preempt(self) -> None:
        """Go back to waiting: the tokens so far stay, but all of them are recomputed."""
        self.recompute_until = max(self.recompute_until, self.computed)
        self.computed = 0
        self.preemptions += 1
        self.state = "waiting"
        if not self.output_ids:
            self.prompt_details.clear()

    def tokens(self, start: int, count: int) -> list[int]:
        """Return the token ids of positions start .. start + count."""
        n = len(self.prompt_ids)
        if start >= n:
            return self.output_ids[start - n : start - n + count]
        prompt = self.prompt_ids[start : start + count]
        return [*prompt, *self.output_ids[: count - len(prompt)]]
