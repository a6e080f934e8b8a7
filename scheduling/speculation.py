"""Drafts: tokens that a sequence may get, computed in one step with the one that it has pending (speculative decoding).

A drafter proposes them. Here is decided how many of them a step computes; which are accepted is found when the step
is committed. The text of a request never depends on them. This module must not know how a drafter finds them or how a
token is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduling.acceptance import Acceptance
from scheduling.draft_choice import DraftChoice
from scheduling.iteration import Drafted, Plan
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.sequence import Sequence
from scheduling.step_law import StepLaw

MOST = 8  # drafts of a sequence in one step
ASKING = 0.005  # the share of the time in which the drafter may be asked for nothing
PROBING = 0.005  # the share of the time in which drafts may be computed that promise nothing, to learn whether they do
LEAST_PRICE = 0.02  # of such a draft, in steps: one with drafts takes a little longer, however few they are
LONGEST_REST = 200  # steps in which the drafter is not asked
# Steps of a size without drafts, at first and then for each so many: what drafts cost is a difference from these.
FIRST_PLAIN, PLAIN_EVERY = 2, 400


class Offer(NamedTuple):
    """Up to `most` drafts for the sequence at `place`; those of one `kind` are about equally likely to be right."""

    place: int
    most: int
    kind: int = 0


class Drafter(Protocol):
    """Proposes the next tokens of sequences; between two steps, while the engine waits.

    `spent` are the seconds that the last `propose` took, 0 if they do not matter.
    """

    spent: float

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """Return what it may propose for those of the sequences that have an answer; nothing is the usual case."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Return up to `counts[i]` tokens that may follow those of `sequences[i]`."""
        ...

    def seconds(self, sequences: int) -> float:
        """Return how long the next token of so many sequences takes to propose."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Free what it holds for a sequence that loses its slot, finished or not."""
        ...


class Speculator:
    """Puts drafts into plans; with `fixed`, as many as that for each sequence, and otherwise as many as are worth it.

    While drafts bring nothing, a step then costs what it costs without a speculator, because the drafter rests: it is not
    asked for some steps, and for more of them the longer asking took by `clock`.
    """

    def __init__(self, drafter: Drafter, fixed: int | None = None, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.drafter = drafter
        self.fixed = fixed
        self.acceptance = Acceptance()
        self.law = StepLaw()
        self._clock = clock
        self._allowance = 0.0  # seconds that may be spent on probing
        self._probing = (
            0  # remaining steps of a probe: the one with the draft, and the next, which must be laid out again
        )
        self._steps = 0
        self._batches: defaultdict[int, _Batch] = defaultdict(_Batch)  # by their approximate number of rows
        self._plain_rows = 0  # of the step before, if it had no drafts
        self._kinds: dict[Sequence, int] = {}  # of the drafts in this step

    @property
    def most(self) -> int:
        """The most drafts of a sequence in one step."""
        return MOST if self.fixed is None else self.fixed

    def add_drafts(self, plan: Plan, policy: Policy, pages: Reservations, token_budget: int) -> None:
        """Put drafts behind the pending tokens of a plan, within the token budget and the free pages."""
        if plan.padded or self.fixed == 0:
            return
        if self.fixed is None and ((not plan.repeats and max(plan.counts) > 1) or self._rests(len(plan.sequences))):
            return
        began = self._clock()
        offers = [offer for offer in self.drafter.survey(plan.sequences) if self._may_have(plan, offer)]
        left = token_budget - sum(plan.counts)
        members = [plan.sequences[offer.place] for offer in offers]
        counts = [
            min(offer.most, self.most, seq.max_tokens - len(seq.output_ids) - 1) for offer, seq in zip(offers, members)
        ]
        if self.fixed is None:
            counts = self._choose(plan, policy, offers, members, counts, left) if offers else []
            if not any(counts):
                self._rest(len(plan.sequences), self._clock() - began)
                if offers and left > 0 and self._may_probe(len(plan.sequences)):
                    counts[self.acceptance.least_recent(members)] = 1  # whose drafts were judged longest ago
        self._put(plan, pages, offers, counts, left)

    def _may_have(self, plan: Plan, offer: Offer) -> bool:
        seq = plan.sequences[offer.place]
        return seq.pending == 1 and bool(seq.output_ids) and len(seq.output_ids) + 1 < seq.max_tokens

    def _choose(
        self, plan: Plan, policy: Policy, offers: list[Offer], members: list[Sequence], most: list[int], left: int
    ) -> list[int]:
        rows = len(plan.sequences)
        chances = [self.acceptance.chance(seq, offer.kind) for seq, offer in zip(members, offers)]
        seconds = self.law.from_rows(rows)
        choice = DraftChoice(members, most, chances, rows, left, seconds, self.drafter.seconds(len(members)))
        return policy.allocate_drafts(choice)

    def _may_probe(self, rows: int) -> bool:
        """Return whether a draft may be computed that promises nothing, and pay for it."""
        steps = max(LEAST_PRICE, self._batches[_about(rows)].price)
        price = steps * self.law.seconds(rows, unknown=1.0) + self.drafter.seconds(1)
        if self._allowance < price:
            return False
        self._allowance, self._probing = self._allowance - price, 2
        return True

    def _rests(self, rows: int) -> bool:
        """Return whether the drafter rests, or too few steps without drafts are known for batches of about this size."""
        batch = self._batches[_about(rows)]
        is_unknown = batch.plain < FIRST_PLAIN or self._steps - batch.latest > PLAIN_EVERY
        return is_unknown or self._steps < batch.rests_until

    def _rest(self, rows: int, asked: float) -> None:
        """Let the drafter rest after asking it took `asked` seconds and brought nothing, so that asking takes little of the time."""
        batch = self._batches[_about(rows)]
        usual, batch.asked = min(asked, batch.asked), asked  # the first look at a prompt takes longer
        steps = usual / ASKING / self.law.seconds(rows, unknown=1.0)
        batch.rests_until = self._steps + 1 + int(min(steps, LONGEST_REST))

    def _put(self, plan: Plan, pages: Reservations, offers: list[Offer], counts: list[int], left: int) -> None:
        members: list[tuple[Offer, int]] = []
        for offer, count in zip(offers, counts):
            count = min(count, left)
            if count > 0:
                count = pages.lend(plan.sequences[offer.place], count)
            if count > 0:
                members.append((offer, count))
                left -= count
        if not members:
            return
        chosen, asked = [plan.sequences[offer.place] for offer, _ in members], [count for _, count in members]
        proposed = self.drafter.propose(chosen, asked)
        plan.counts, plan.repeats = list(plan.counts), False
        plan.drafts = [[] for _ in plan.sequences]
        self._kinds.clear()
        for (offer, count), drafts in zip(members, proposed):
            if drafts:
                plan.drafts[offer.place] = drafts = drafts[:count]
                plan.counts[offer.place] += len(drafts)
                self._kinds[plan.sequences[offer.place]] = offer.kind
        if not self._kinds:
            plan.drafts = []

    def learn(self, plan: Plan, counted: list[Drafted], seconds: float) -> None:
        """Learn from a step that took so long: `counted` are the drafts of each sequence with some."""
        rows = len(plan.sequences)
        if plan.drafts:
            for seq, own in zip((s for s, drafts in zip(plan.sequences, plan.drafts) if drafts), counted):
                judged = own.accepted if seq.is_finished else own.drafted  # those behind its end may have been right
                self.acceptance.judge(seq, self._kinds.pop(seq, 0), judged, own.accepted)
            seconds -= self.drafter.spent
        elif plan.padded or (not plan.repeats and max(plan.counts, default=0) > 1):
            self._plain_rows = 0
            return
        self._steps += 1
        self._allowance = min(self._allowance + PROBING * seconds, seconds)
        batch = self._batches[_about(rows)]
        if plan.repeats and self._steps % 4 and self._steps < batch.rests_until and not self._probing:
            return  # enough is learned from the fourth part of the steps in which nothing changes
        took = min(2.0, seconds / self.law.seconds(rows, unknown=seconds or 1.0))
        if self._probing:
            self._probing -= 1
            batch.price += 0.1 * (2 * (took - batch.took) - batch.price)
        if plan.drafts:
            self.law.learn(sum(plan.counts), seconds)
        elif rows == self._plain_rows:  # the layout is that of the step before, as it would be without a speculator
            self.law.learn(rows, seconds)
            batch.plain, batch.latest = batch.plain + 1, self._steps
            batch.took += 0.02 * (took - batch.took)
        self._plain_rows = 0 if plan.drafts else rows

    def forget(self, sequences: list[Sequence]) -> None:
        """Free what is held for sequences that lose their slots."""
        for seq in sequences:
            self.drafter.forget(seq)
            self.acceptance.forget(seq)


@dataclass(slots=True)
class _Batch:
    """What the speculator knows about batches of similar size.

    `plain` counts their steps without drafts, `latest` is the number of the last one, and `took` is their average time as a
    multiple of the law's. `price` is the extra time of a probe, in steps. `asked` is how many seconds the drafter took the
    last time it brought nothing, and it is not asked again before step `rests_until`.
    """

    plain: int = 0
    latest: int = 0
    took: float = 1.0
    price: float = LEAST_PRICE
    asked: float = 0.0
    rests_until: int = 0


def _about(rows: int) -> int:
    """Return a number that sizes of steps share which differ by an eighth at most."""
    return rows if rows < 8 else rows >> (rows.bit_length() - 4) << (rows.bit_length() - 4)
