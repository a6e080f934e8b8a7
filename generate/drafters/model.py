"""Let a smaller model of the same tokenizer propose draft tokens, one after the other.

It draws with the request's own parameters, seed and positions: where the two models agree on what is likely, the same
random number gives the same token, at any temperature. It has KV pages of its own, and computes what it has not seen of a
text when it is asked to go on with it: a whole prompt the first time, later the tokens that came without it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from generate.runner import Runner
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.sequence import Sequence
from scheduling.speculation import MOST, Offer
from scheduling.step_law import StepLaw

CHUNK = 256  # tokens of texts that are caught up on before one step
NEAR = MOST + 1  # tokens that were not computed, up to which a text goes on
WORTHWHILE = 1.0  # times a draft token for each token that is left, up to which the text before may take to compute
ABOUT = 1e-3  # seconds of a draft token, before one was measured


class ModelDrafter:
    """Drafts of `runner`, whose model has `context` tokens of context and whose pages are its own."""

    def __init__(self, runner: Runner, pages: int, context: int) -> None:
        self.spent = 0.0
        self._runner = runner
        self._context = context
        self.pool = PagePool(pages, runner.page_size, prefix_cache=False)
        self._twins: dict[Sequence, Sequence] = {}  # each sequence as this model knows it
        self._law = StepLaw()
        self._per_token = ABOUT / 8  # seconds of a text that is caught up on
        self._number = 0
        self._last: list[Sequence] = []

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`; a text is not begun for an answer that will have ended before that pays."""
        offers = []
        for i, seq in enumerate(sequences):
            if not seq.output_ids:
                continue
            left = seq.max_tokens - len(seq.output_ids) - 1
            most = min(MOST, left, self._context - seq.length)
            twin = self._twins.get(seq)
            behind = seq.length - (twin.computed if twin is not None else 0)
            if most > 0 and behind * self._per_token <= left * self.seconds(1) * WORTHWHILE:
                offers.append(Offer(i, most))
        return offers

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`; a sequence for which there are no pages, or that is still far behind, gets none."""
        began = time.perf_counter()
        twins = [self._twin(seq, count) for seq, count in zip(sequences, counts)]
        self._catch_up([twin for twin in twins if twin is not None])
        ready = [
            (twin, seq.length, count)
            for twin, seq, count in zip(twins, sequences, counts)
            if twin is not None and twin.pending <= NEAR
        ]
        done = 0
        while going := [twin for twin, length, count in ready if twin.length < length + count]:
            started = time.perf_counter()
            self._step(going, [twin.pending for twin in going], draws=True)
            if done:
                self._law.learn(len(going), time.perf_counter() - started)
            done += 1
        self.spent = time.perf_counter() - began
        return [
            [] if twin is None else twin.tokens(seq.length, count)  # nothing, of one that is behind
            for twin, seq, count in zip(twins, sequences, counts)
        ]

    def _twin(self, seq: Sequence, count: int) -> Sequence | None:
        """Return the sequence as this model knows it, with the tokens that it has by now and pages for more."""
        twin = self._twins.get(seq)
        if twin is None:
            sampling = replace(seq.sampling, logprobs=None, prompt_logprobs=None)
            twin = Sequence(seq.prompt_ids, seq.max_tokens, sampling=sampling)
        ids, known = seq.output_ids, twin.output_ids
        agreed = min(len(ids), len(known))
        # What was proposed since the last time may be wrong; all before it is equal.
        first = max(0, twin.computed - len(twin.prompt_ids) - MOST - 1)
        agreed = next((j for j in range(first, agreed) if ids[j] != known[j]), agreed)
        known[agreed:] = ids[agreed:]
        # The last token is computed once more, since its logits are needed.
        twin.computed = min(twin.computed, len(twin.prompt_ids) + agreed, seq.length - 1)
        while len(twin.pages) * self._runner.page_size < seq.length + count:
            if not self.pool.free:
                self.pool.release(twin.pages)
                self._twins.pop(seq, None)
                return None
            twin.pages.append(self.pool.take())
        self._twins[seq] = twin
        return twin

    def _catch_up(self, twins: list[Sequence]) -> None:
        """Compute all but a few tokens of each text, as many of all as do not keep other requests waiting."""
        left = CHUNK
        for twin in twins:
            count = min(left, twin.pending - 1)
            if twin.pending > NEAR and count:
                started = time.perf_counter()
                self._step([twin], [count], draws=False)
                twin.computed += count
                left -= count
                self._per_token += 0.2 * ((time.perf_counter() - started) / count - self._per_token)

    def _step(self, twins: list[Sequence], counts: list[int], draws: bool) -> None:
        self._number += 1
        # The runner keeps the layout of a step for the next one if the same sequences decode again.
        repeats = draws and twins == self._last and max(counts) == 1
        outputs = self._runner.forward(Plan(self._number, 0.0, twins, counts, repeats=repeats))
        self._last = twins
        for twin, count, output in zip(twins, counts, outputs) if draws else ():
            twin.computed += count
            # A row that is not finite is a bad draft token, no failure: the other model has its own numbers.
            twin.output_ids.append(output if isinstance(output, int) else 0)

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`."""
        return self._law.seconds(sequences, ABOUT)

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        twin = self._twins.pop(seq, None)
        if twin is not None:
            self.pool.release(twin.pages)
