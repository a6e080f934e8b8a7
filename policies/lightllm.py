"""LightLLM's and S-LoRA's loop: admit every few decode steps, by the peak that the KV cache will reach.

Admission is tried when no request runs, or when `max_wait` decode steps have passed since the last one joined, and then
in each step until one does. A candidate fits if the tokens in cache stay below `pool`, and the pages suffice, to the
end: with all requests sorted by the tokens still to come, most first, the peak is the maximum over k of (rest_k x k +
sum of what the first k hold now). Requests that join get a step for their prompts, at most `batch_max_tokens` of them,
in which the others pause. A request that exceeds the pool runs alone.

The peak counts on the length that a request asks for or, if its client named none, on the answers of the past
(Past-Future, ASPLOS 2025): of the latest ones that were longer than its own is now, each request takes another quantile.
With a `predictor` other than `oracle` it counts on the prediction, until an answer is longer.
Pages are taken as answers grow, and the last to join is preempted when the prediction was too low.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable
from math import ceil

from policies.orders._predictions import Predicting
from scheduling.iteration import Plan
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

REMEMBERED = 1000  # answers of the past
GOLDEN = 0.6180339887498949  # multiples of it are spread evenly between two whole numbers


def peak(parts: Iterable[tuple[int, int]]) -> int:
    """Return the most tokens that requests will hold together, each given by (tokens to come, tokens held now)."""
    most = held = 0
    for k, (rest, holds) in enumerate(sorted(parts, reverse=True), 1):
        held += holds
        most = max(most, rest * k + held)
    return most


class Policy(Predicting):
    separate_prefill = True
    max_wait = option(10, "decode steps between two admissions", low=0)
    batch_max_tokens = option(3072, "maximum prompt tokens per admission", low=1)
    pool = option(10_000, "KV tokens", low=1)
    per_adapter = option(0, "KV tokens set aside for each adapter in the batch; S-LoRA: four times its rank", low=0)
    per_client = option(
        0, "KV tokens set aside for each client in the batch, where each has an adapter of its own", low=0
    )

    def __init__(self) -> None:
        self._decodes = 0  # steps since a request joined
        self._answers: deque[int] = deque()  # lengths of the latest answers whose end was not known before
        self._lengths: list[int] = []  # the same, sorted
        self._quantile: dict[Sequence, float] = {}  # of the answers of the past, that a request counts on
        self._quantiles = 0
        counted = [name for name in ("client", "adapter") if getattr(self, f"per_{name}")]
        self._guesses = self.predictor != "oracle"
        uses = [name for name in self.claims.uses if self._guesses or name != "length"]
        uses += [*counted, "length"] if counted else []
        self.claims = self.claims.but(uses=tuple(dict.fromkeys(uses)))

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        due = not running or self._decodes >= self.max_wait
        return min(len(waiting), budget.slots) if due else 0

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        prompts = [other.pending for other in running if other.is_prefilling]
        if prompts and sum(prompts) + seq.pending > min(self.batch_max_tokens, budget.tokens):
            return "token_budget"
        if not running:
            return None
        batch = [*running, seq]
        most = peak((self._rest(s), s.length - bool(s.output_ids)) for s in batch)  # the newest is not in cache yet
        pool = self.pool - self.per_client * len({other.client for other in batch})
        pool -= self.per_adapter * len({other.adapter for other in batch if other.adapter})
        # The last page of each request may be nearly empty.
        peak_of_pages = most + len(batch) * budget.page_size
        pages = budget.kv_tokens + sum(len(other.pages) for other in running) * budget.page_size
        return "kv_full" if most >= pool or peak_of_pages > pages else None

    def reserve_tokens(self, seq: Sequence) -> int:
        return seq.length + min(self.margin, self._rest(seq))

    def _rest(self, seq: Sequence) -> int:
        """Return how many more tokens a request will generate, as far as that is known."""
        tokens = len(seq.output_ids)
        if self._guesses and self.predict(seq) > tokens:
            return min(ceil(self.predict(seq)), seq.max_tokens) - tokens
        if not self._guesses and not seq.open_ended:
            return int(self.predict(seq)) - tokens
        longer = bisect_right(self._lengths, tokens)
        if longer == len(self._lengths):
            return seq.max_tokens - tokens
        if seq not in self._quantile:
            self._quantiles += 1
            self._quantile[seq] = self._quantiles * GOLDEN % 1
        index = longer + int(self._quantile[seq] * (len(self._lengths) - longer))
        return min(seq.max_tokens, self._lengths[index]) - tokens

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._decodes = 0

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        self._decodes += any(len(seq.output_ids) > 1 for seq in plan.sequences)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._quantile.pop(seq, None)
        if (seq.open_ended or self._guesses) and seq.finish_reason != "abort":
            self._answers.append(len(seq.output_ids))
            insort(self._lengths, len(seq.output_ids))
            if len(self._answers) > REMEMBERED:
                del self._lengths[bisect_left(self._lengths, self._answers.popleft())]
