"""The running sequences: their slots and pages, taken at admission and freed together, and their tokens in a step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Budget, Policy, PolicyError
from scheduling.reservations import ENDLESS, Reservations
from scheduling.sequence import Sequence


class RunningBatch:
    """`running` is in order of admission; `slot_cap` bounds it below the number of slots, whose numbers are `slots`.

    `numbers` are those that it may have, if other batches have the others. If sequences take more than one slot, all of
    them together take at most `most`, and one alone at most `most_alone`, which may be more than there are.
    """

    def __init__(self, pool: PagePool | None, numbers: range | None = None) -> None:
        self.running: list[Sequence] = []
        self.decoding = 0  # how many of the first got a token in the last step, and are not done
        self.pages = Reservations(pool)
        self.slot_cap = self.most = self.most_alone = ENDLESS
        self._extra = 0  # slots that running sequences take beyond one each
        self.numbers = range(ENDLESS) if numbers is None else numbers
        self.slots = self.numbers[:0]
        self._free_slots: list[int] = []  # a heap: the lowest is taken first

    def resize(self, slots: int) -> None:
        """Change the number of slots; sequences in higher slots keep them until they leave."""
        taken = {seq.slot for seq in self.running}
        self.slots = self.numbers[:slots]
        self._free_slots = [i for i in self.slots if i not in taken]

    @property
    def free_slots(self) -> int:
        """How many sequences may join now."""
        return max(0, min(len(self._free_slots), self.slot_cap - len(self.running)))

    @property
    def taken(self) -> int:
        """The slots that the running sequences take, one for each of their answers."""
        return len(self.running) + self._extra

    def fits(self, seq: Sequence) -> bool:
        """Return whether enough slots are free for a sequence that takes several."""
        if self._extra + seq.slots == 1:
            return True
        return self.taken + seq.slots <= (min(self.most, len(self.slots)) if self.running else self.most_alone)

    def budget(self, tokens: int) -> Budget:
        """Return what is free before a step that may compute this many tokens."""
        return Budget(self.free_slots, self.pages.free_tokens, tokens, self.pages.page_size)

    def join(self, seq: Sequence, tokens: int) -> bool:
        """Give a sequence a slot and pages for `tokens` tokens; return False if too few pages are free."""
        if not self.pages.reserve(seq, tokens):
            return False
        seq.slot = heapq.heappop(self._free_slots)
        seq.state = "running"
        self.running.append(seq)
        self._extra += seq.slots - 1
        return True

    def plan(self, policy: Policy, token_budget: int, number: int, now: float) -> Plan:
        """Return the tokens of each sequence in a step; raise PolicyError if they cannot be computed."""
        own = type(policy).allocate_tokens is not Policy.allocate_tokens
        if self.decoding and self.decoding == len(self.running) and not own:
            return self._decode_plan(policy, token_budget, number, now)
        if policy.padded and not policy.separate_prefill:
            return self._padded_plan(number, now)
        return self._mixed_plan(policy, token_budget, number, now, own)

    def _decode_plan(self, policy: Policy, token_budget: int, number: int, now: float) -> Plan:
        """Let each sequence compute the one token that it is known to have pending."""
        known = self.decoding
        plan = Plan(number, now, self.running[:], [1] * known, padded=policy.padded, decoding=known)
        return self._share(plan, plan.sequences[:1], token_budget)

    def _padded_plan(self, number: int, now: float) -> Plan:
        """Let each sequence compute all that it has pending, in rows of equal length."""
        live, held = self._split()
        return self._share(Plan(number, now, live, [seq.pending for seq in live], held, True), live[:1], ENDLESS)

    def _split(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences that compute something, and those that are done and only hold their slots."""
        if self.decoding:
            return self.running[:], []
        held = [seq for seq in self.running if seq.finish_reason is not None]
        return [seq for seq in self.running if seq.finish_reason is None], held

    def _mixed_plan(self, policy: Policy, token_budget: int, number: int, now: float, own: bool) -> Plan:
        """Let the policy divide the tokens of a step, those of prompts and those of answers; `own`: by its own hook."""
        known, (live, held) = self.decoding, self._split()
        known = 0 if own or (policy.separate_prefill and known < len(live)) else known
        budget = (ENDLESS if policy.padded else token_budget) - known
        counts = [1] * known + list(policy.allocate_tokens(live[known:], budget))
        if len(counts) != len(live):
            raise PolicyError(f"allocate_tokens: {len(counts)} numbers for {len(live)} running sequences")
        if own:
            for seq, count in zip(live, counts):
                if not 0 <= count <= seq.pending:
                    raise PolicyError(f"allocate_tokens: {count} tokens for {seq.id}, which has {seq.pending} left")
        first, paused = live[:1], list[Sequence]()
        if not all(counts):
            paused = [seq for seq, count in zip(live, counts) if not count]
            live = [seq for seq, count in zip(live, counts) if count]
            counts = [count for count in counts if count]
            if not live and not held:
                raise PolicyError("allocate_tokens: no running request computes a token")
        plan = Plan(number, now, live, counts, held, policy.padded, paused=paused, decoding=known)
        return self._share(plan, first, token_budget)

    def _share(self, plan: Plan, first: list[Sequence], token_budget: int) -> Plan:
        """Pause those that need pages of a later step; if that are all, compute the `first` that runs, which needs none."""
        plan.readers, early = self.pages.sharers(plan)
        if plan.padded and plan.readers:
            # The rest of a prompt would be padded to the whole one beside it, unless it is computed in the next step.
            rest = max(seq.pending for seq in plan.readers)
            if len(plan.counts) * rest < len(plan.readers) * max(plan.counts):
                early, plan.readers = [*early, *plan.readers], []
        if early:
            plan.pause(early)
            if not plan.sequences:
                plan.sequences, plan.counts = first, [min(seq.pending, token_budget) for seq in first]
                plan.paused = [seq for seq in plan.paused if seq not in first]
        return plan

    def vacate(self, leaving: Collection[Sequence]) -> None:
        """Free slots and pages; raise PolicyError when a sequence is named twice or is not running."""
        gone = set(leaving)
        kept = [seq for seq in self.running if seq not in gone]
        if len(gone) < len(leaving) or len(kept) + len(gone) != len(self.running):
            named = ", ".join(seq.id for seq in leaving)
            raise PolicyError(f"release or preempt: {named}: one of them twice, or not running")
        self.decoding = len(kept) if self.decoding == len(self.running) else 0
        self.running[:] = kept
        for seq in leaving:  # before any of them gives back pages that others await
            seq.computed = self.pages.sound(seq)
        for seq in leaving:
            # If a policy with fewer slots took over since this one was given out, it ends with its sequence.
            if seq.slot in self.slots:
                heapq.heappush(self._free_slots, seq.slot)
            self.pages.release(seq)
            self._extra -= seq.slots - 1
        self.pages.hand_over(self.running)

    def grow(
        self, choose_victim: Callable[[list[Sequence], float], Sequence], now: float, victims: list[Sequence]
    ) -> None:
        """Give each sequence the pages that its next step needs; add those to `victims` that lose slot and pages for it."""
        short = self.pages.outgrown(self.running)
        try:
            for seq in short:
                while seq not in victims and not self.pages.grow(seq):
                    victims += self._free_pages(choose_victim, now)
        except BaseException:
            # `outgrown` names each of them once, so those that still lack a page must come up again.
            self.pages.look_again([seq for seq in short if seq not in victims])
            raise

    def _free_pages(self, choose_victim: Callable[[list[Sequence], float], Sequence], now: float) -> list[Sequence]:
        """Take the pages of one sequence, and its slot unless it is finished and only holds it."""
        live = [seq for seq in self.running if seq.finish_reason is None]
        if len(live) > 1:
            victim = choose_victim(list(live), now)
            if victim not in live:
                raise PolicyError(f"victim: {victim.id} is not running. Return one of the requests passed in")
            self.vacate([victim])
            return [victim]
        # Alone, each sequence fits. Finished ones keep their slots without pages, and are computed no more.
        for seq in self.running:
            if seq is not live[0]:
                self.pages.release(seq)
        return []
