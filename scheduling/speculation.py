"""Drafts: tokens that a sequence may get, computed in one step with the one that it has pending (speculative decoding).

A drafter proposes them. Here is decided how many of them a step computes; which are accepted is found when the step
is committed. The text of a request never depends on them. This module must not know how a drafter finds them or how a
token is computed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scheduling.acceptance import Acceptance
from scheduling.draft_choice import DraftChoice
from scheduling.iteration import Drafted, Plan
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.sequence import Sequence
from scheduling.step_law import StepLaw

MOST = 8  # drafts of a sequence in one step
PROBING = 0.004  # the share of the time in which drafts may be computed that promise nothing, to learn whether they do
LEAST_PRICE = 0.02  # of such a draft, in steps: one with drafts takes a little longer, however few they are
# Steps of a size without drafts, at first and then for each so many: what drafts cost is a difference from these.
FIRST_PLAIN, PLAIN_EVERY = 2, 200


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
    """Puts drafts into plans; with `fixed`, as many as that for each sequence, and otherwise as many as are worth it."""

    def __init__(self, drafter: Drafter, fixed: int | None = None) -> None:
        self.drafter = drafter
        self.fixed = fixed
        self.acceptance = Acceptance()
        self.law = StepLaw()
        self._allowance = 0.0  # seconds that may be spent on probing
        self._steps = 0
        self._plain: dict[int, tuple[int, int]] = {}  # steps without drafts by about their rows: how many, the latest
        self._kinds: dict[Sequence, int] = {}  # of the drafts in this step

    @property
    def most(self) -> int:
        """The most drafts of a sequence in one step."""
        return MOST if self.fixed is None else self.fixed

    def add_drafts(self, plan: Plan, policy: Policy, pages: Reservations, token_budget: int) -> None:
        """Put drafts behind the pending tokens of a plan, within the token budget and the free pages."""
        if plan.padded or self.fixed == 0 or (self.fixed is None and not plan.repeats and max(plan.counts) > 1):
            return
        offers = [offer for offer in self.drafter.survey(plan.sequences) if self._may_have(plan, offer)]
        if not offers:
            return
        left = token_budget - sum(plan.counts)
        members = [plan.sequences[offer.place] for offer in offers]
        most = [
            min(offer.most, self.most, seq.max_tokens - len(seq.output_ids) - 1) for offer, seq in zip(offers, members)
        ]
        counts = most if self.fixed else self._choose(plan, policy, offers, members, most, left)
        self._put(plan, pages, offers, counts, left)

    def _may_have(self, plan: Plan, offer: Offer) -> bool:
        seq = plan.sequences[offer.place]
        return seq.pending == 1 and bool(seq.output_ids) and len(seq.output_ids) + 1 < seq.max_tokens

    def _choose(
        self, plan: Plan, policy: Policy, offers: list[Offer], members: list[Sequence], most: list[int], left: int
    ) -> list[int]:
        rows = len(plan.sequences)
        if self._must_measure(rows):
            return [0] * len(members)
        chances = [self.acceptance.chance(seq, offer.kind) for seq, offer in zip(members, offers)]
        seconds = self.law.from_rows(rows)
        choice = DraftChoice(members, most, chances, rows, left, seconds, self.drafter.seconds(len(members)))
        counts = policy.allocate_drafts(choice)
        if left > 0 and not any(counts):
            price = max(seconds(rows + 1) - seconds(rows), LEAST_PRICE * seconds(rows)) + self.drafter.seconds(1)
            if self._allowance >= price:  # the one whose drafts were judged longest ago
                self._allowance -= price
                counts[self.acceptance.least_recent(members)] = 1
        return counts

    def _must_measure(self, rows: int) -> bool:
        """Return whether a step of so many rows without drafts, or about so many, was not computed for long."""
        steps, latest = self._plain.get(_about(rows), (0, 0))
        return steps < FIRST_PLAIN or self._steps - latest > PLAIN_EVERY

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
        if plan.drafts:
            for seq, own in zip((s for s, drafts in zip(plan.sequences, plan.drafts) if drafts), counted):
                judged = own.accepted if seq.is_finished else own.drafted  # those behind its end may have been right
                self.acceptance.judge(seq, self._kinds.pop(seq, 0), judged, own.accepted)
            seconds -= self.drafter.spent
        elif plan.padded or (not plan.repeats and max(plan.counts, default=0) > 1):
            return
        else:
            about = _about(len(plan.sequences))
            self._plain[about] = self._plain.get(about, (0, 0))[0] + 1, self._steps
        self._steps += 1
        self._allowance = min(self._allowance + PROBING * seconds, seconds)
        self.law.learn(sum(plan.counts), seconds)

    def forget(self, sequences: list[Sequence]) -> None:
        """Free what is held for sequences that lose their slots."""
        for seq in sequences:
            self.drafter.forget(seq)
            self.acceptance.forget(seq)


def _about(rows: int) -> int:
    """Return a number that sizes of steps share which differ by an eighth at most."""
    return rows if rows < 8 else rows >> (rows.bit_length() - 4) << (rows.bit_length() - 4)
