"""Drafts: tokens that a sequence may get, computed in one step with the one that it has pending (speculative decoding).

A drafter proposes them, this module decides how many of them a step computes, and `scheduling/advance.py` finds which are
accepted. The text of a request never depends on them. This module must not know how a drafter finds them or how a token
is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduling.draft_choice import DraftChoice
from scheduling.iteration import Drafted, Plan
from scheduling.policy import Policy
from scheduling.reservations import Reservations
from scheduling.sequence import Sequence
from scheduling.step_law import StepLaw

MOST = 8  # drafts of a sequence in one step
ASKING = 0.005  # the share of the time that the drafter may spend on looking without an offer that is worth it
PROBING = 0.005  # the share of the time that probes may cost
LEAST_PRICE = 0.02  # of a probe, in steps: a step with drafts takes a little longer, however few they are
LONGEST_REST = 200  # steps in which the drafter is not asked
# The cost of drafts is the difference from steps without any. So the first ones of each size have none, and one in so many.
FIRST_PLAIN, PLAIN_EVERY = 2, 400
DISTURBED = 2  # steps whose time a probe changes: the one with the draft, and the next, which must be laid out again
RESTING_SAMPLE = 4  # one step in so many is learned from while the drafter rests and nothing changes
LONGEST_STEP = 2.0  # times the expected time; a longer step was held up by something else, and counts as this long
PRICE_GAIN, TOOK_GAIN = 0.1, 0.02  # how far one step moves the averages `price` and `took` of its size
FADING = 0.95  # of what was seen, with each draft that is judged: about the last 20 count
PRIOR = 4.0  # drafts that the estimate of all counts for in that of one sequence
START = (2.0, 1.2)  # drafts that were judged, and right, of a kind of which none was


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
        """Free what it holds for a sequence that loses its slot, finished or not, and was surveyed or has a client."""
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
        self.rests = False  # the drafter is not asked if the next step repeats the last one
        self._clock = clock
        self._allowance = 0.0  # seconds that may be spent on probes
        self._disturbed = 0  # of the next steps, how many the last probe changes the time of
        self._steps = 0  # that were learned from: decodes, with or without drafts
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)  # by their approximate number of rows
        self._last = 0, _Size()  # the rows of the last step, and what is known of their size
        self._plain_rows = 0  # of the step before, if it was a decode without drafts
        self._kinds: dict[Sequence, int] = {}  # of the drafts in this step
        self._known: set[Sequence] = set()  # of which the drafter was asked

    @property
    def most(self) -> int:
        """The most drafts of a sequence in one step."""
        return MOST if self.fixed is None else self.fixed

    def add_drafts(self, plan: Plan, policy: Policy, pages: Reservations, token_budget: int) -> None:
        """Put drafts behind the pending tokens of a plan, within the token budget and the free pages."""
        if plan.padded or self.fixed == 0:
            return
        if self.fixed is None and (
            (not plan.repeats and max(plan.counts) > 1) or self._rests(self._sizes[_about(len(plan.sequences))])
        ):
            return
        began = self._clock()
        self._known.update(plan.sequences)
        offers = [offer for offer in self.drafter.survey(plan.sequences) if self._may_have(plan, offer)]
        left = token_budget - sum(plan.counts)
        members = [plan.sequences[offer.place] for offer in offers]
        counts = [
            min(offer.most, self.most, seq.max_tokens - len(seq.output_ids) - 1) for offer, seq in zip(offers, members)
        ]
        if self.fixed is None:
            counts = self._choose(plan, policy, offers, members, counts, left) if offers else []
            if not any(counts):
                # Only a look that was in vain is made up for: one that found drafts pays for itself.
                self._rest(len(plan.sequences), self._clock() - began)
                if offers and left > 0 and self._pay_for_probe(len(plan.sequences)):
                    counts[self.acceptance.least_recent(members)] = 1
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

    def _pay_for_probe(self, rows: int) -> bool:
        """Spend allowance on a probe, a draft with no expected gain; return False if there is too little."""
        steps = max(LEAST_PRICE, self._sizes[_about(rows)].price)
        price = steps * self.law.seconds(rows, unknown=1.0) + self.drafter.seconds(1)
        if self._allowance < price:
            return False
        self._allowance, self._disturbed = self._allowance - price, DISTURBED
        return True

    def _rests(self, size: _Size) -> bool:
        """Return whether the drafter rests, or the time of steps of this size without drafts is not known."""
        is_unknown = size.plain < FIRST_PLAIN or self._steps - size.latest > PLAIN_EVERY
        return is_unknown or self._steps < size.rests_until

    def _rest(self, rows: int, asked: float) -> None:
        """Let the drafter rest after asking it took `asked` seconds and brought nothing, for long enough to make that up."""
        size = self._sizes[_about(rows)]
        # The first look at a prompt indexes all of it, so that one slow look alone says nothing about the next.
        usual, size.asked = min(asked, size.asked), asked
        steps = usual / ASKING / self.law.seconds(rows, unknown=1.0)
        size.rests_until = self._steps + 1 + int(min(steps, LONGEST_REST))

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
        # Only now, when slots in the step and pages are certain: proposing may take long, and the tokens would be lost.
        chosen, asked = [plan.sequences[offer.place] for offer, _ in members], [count for _, count in members]
        proposed = self.drafter.propose(chosen, asked)
        # A copy: a plan that repeats shares its counts with the one before.
        plan.counts, plan.repeats, plan.decoding = list(plan.counts), False, 0
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
        self.rests = False
        if plan.drafts:
            self._judge(plan, counted)
            seconds -= self.drafter.spent
        elif plan.padded or (not plan.repeats and max(plan.counts, default=0) > 1):
            self._plain_rows = 0  # it computed prompts or padding, and says nothing about decodes
            return
        self._steps += 1
        # What is saved up for probes is at most one step's time, so that no burst of them follows a long time without.
        self._allowance = min(self._allowance + PROBING * seconds, seconds)
        rows, size = self._last
        if rows != len(plan.sequences):
            rows = len(plan.sequences)
            self._last = rows, size = rows, self._sizes[_about(rows)]
        is_resting = plan.repeats and not self._disturbed and self._steps < size.rests_until
        if not is_resting or not self._steps % RESTING_SAMPLE:
            self._measure(plan, rows, size, seconds)
        self.rests = self.fixed is None and self._rests(size)

    def _measure(self, plan: Plan, rows: int, size: _Size, seconds: float) -> None:
        """Learn from how long a step took."""
        took = min(LONGEST_STEP, seconds / self.law.seconds(rows, unknown=seconds or 1.0))
        if self._disturbed:
            # The price is the extra time of all steps that a probe disturbs; each of them gives an estimate of it.
            self._disturbed -= 1
            size.price += PRICE_GAIN * (DISTURBED * (took - size.took) - size.price)
        if plan.drafts:
            self.law.learn(sum(plan.counts), seconds)
            self._plain_rows = 0
            return
        # Without drafts in between, a runner keeps its layout. So a step that had to be laid out again is not a plain one.
        if rows == self._plain_rows:
            self.law.learn(rows, seconds)
            size.plain, size.latest = size.plain + 1, self._steps
            size.took += TOOK_GAIN * (took - size.took)
        self._plain_rows = rows

    def _judge(self, plan: Plan, counted: list[Drafted]) -> None:
        """Learn from which drafts were right; `counted` has those of each sequence with some, in the plan's order."""
        drafted = (seq for seq, drafts in zip(plan.sequences, plan.drafts) if drafts)
        for seq, own in zip(drafted, counted):
            # Nobody knows whether the drafts behind the end of a text were right.
            judged = own.accepted if seq.is_finished else own.drafted
            self.acceptance.judge(seq, self._kinds.pop(seq, 0), judged, own.accepted)

    def forget(self, sequences: list[Sequence]) -> None:
        """Free what is held for sequences that lose their slots."""
        for seq in sequences:
            # A drafter that was not asked knows nothing of a sequence, but may keep its answer for the next one of its client.
            if seq in self._known or seq.client:
                self.drafter.forget(seq)
                self.acceptance.forget(seq)
        self._known.difference_update(sequences)


class Acceptance:
    """How likely a draft is right, by its kind: a running estimate for each sequence, drawn towards that of all."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[float, float]] = {}
        self._own: dict[Sequence, dict[int, tuple[float, float]]] = {}
        self._judged_at: dict[Sequence, int] = {}
        self._clock = 0

    def chance(self, seq: Sequence, kind: int) -> float:
        """Return how likely the next draft of this kind is right, between 0 and 1."""
        judged, right = self._all.get(kind, START)
        general = right / judged
        own = self._own.get(seq)
        if own is None or kind not in own:
            return general
        judged, right = own[kind]
        return (right + PRIOR * general) / (judged + PRIOR)

    def judge(self, seq: Sequence, kind: int, drafts: int, right: int) -> None:
        """Note that of some drafts for a sequence the first `right` ones were right; those behind the next are unknown."""
        judged = right + (right < drafts)
        own = self._own.setdefault(seq, {})
        own[kind] = _faded(own.get(kind, (0.0, 0.0)), judged, right)
        self._all[kind] = _faded(self._all.get(kind, START), judged, right)
        self._clock += 1
        self._judged_at[seq] = self._clock

    def least_recent(self, sequences: list[Sequence]) -> int:
        """Return the index of the sequence that was judged longest ago."""
        return min(range(len(sequences)), key=lambda i: self._judged_at.get(sequences[i], 0))

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._own.pop(seq, None)
        self._judged_at.pop(seq, None)


def _faded(before: tuple[float, float], judged: int, right: int) -> tuple[float, float]:
    keep = FADING**judged
    return before[0] * keep + judged, before[1] * keep + right


@dataclass(slots=True)
class _Size:
    """What the speculator knows about steps of about the same number of rows.

    `plain` counts those without drafts, `latest` is the number of the last one, and `took` is their average time as a
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
    """Round a number of rows down, such that rows which share the result differ by an eighth at most."""
    return rows if rows < 8 else rows >> (rows.bit_length() - 4) << (rows.bit_length() - 4)
