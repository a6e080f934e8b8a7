"""The KV pages of the scheduler's sequences: reserved when one joins, more as it grows, released when it leaves.

Each running sequence has pages for the tokens of its next step and of the one after, so that a runner may launch a step
ahead. Other sequences can find full pages of a prompt as soon as its sequence joins, and those of an answer once it
leaves: the next turn of a chat finds the last one, and a preempted request finds its own. Pages that are pinned for the next
call of a session go only to a sequence that finds no others. A sequence that finds a page which is not computed yet waits for
the step in which its writer computes it, and may compute its own rest in the same step.

So between two steps, for each running sequence: the first `seq.computed` tokens are in its pages, but for pages that a writer
has not computed yet (`PagePool.writers`), which are the last of those that it found. It computes nothing before the step in
which its writer does, and writes only pages of its own. `sharers` keeps plans so, `sound` says how many tokens are really
computed, `publish` ends the writing of a page, and `release` with `hand_over` lets another sequence write what a leaving one
has not computed.

Without a pool, as in most simulations, pages are unlimited.
"""

from __future__ import annotations

from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.sequence import Sequence

ENDLESS = 1 << 60


class Reservations:
    """The pages of one pool, or unlimited ones, by sequence."""

    def __init__(self, pool: PagePool | None) -> None:
        self._pool = pool
        self.window = 0 if pool is None else pool.window
        self.step = 0
        self.due: dict[int, list[Sequence]] = {}  # by step: sequences whose pages may end in it
        self._watched: dict[Sequence, int] = {}  # the step in which a sequence is due; its other entries are stale
        self._abandoned: set[int] = set()  # pages whose writers have left just now
        self.lent: dict[Sequence, int] = {}  # the pages that sequences had before they got some for their drafts
        # By program and session, the longest pinned first: until when, and the pages.
        self.pins: dict[tuple[str, str], tuple[float, list[int]]] = {}

    @property
    def free_tokens(self) -> int:
        """The tokens that the free pages can hold."""
        return ENDLESS if self._pool is None else self._pool.free * self._pool.page_size

    @property
    def page_size(self) -> int:
        return 1 if self._pool is None else self._pool.page_size

    @property
    def usage(self) -> tuple[int, int]:
        """The number of pages in use and of all pages."""
        return (0, 0) if self._pool is None else (self._pool.used, self._pool.total)

    def hash(self, seq: Sequence) -> None:
        """Hash the prompt of a sequence for the prefix cache, unless that is done."""
        if self._pool is not None and not seq.hashes and len(seq.prompt_ids) > self._pool.page_size:
            seq.hashes = self._pool.hashes(seq.prompt_ids, seq.cache_salt)

    def cached_tokens(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence are in the prefix cache now."""
        return 0 if self._pool is None else self._pool.cached_tokens(self._findable(seq, self._pool))

    def room(self, seq: Sequence) -> int:
        """Return for how many tokens a sequence could get pages now, without pinned ones that it does not share."""
        return ENDLESS if self._pool is None else self._pool.room(self._findable(seq, self._pool)) * self.page_size

    def _findable(self, seq: Sequence, pool: PagePool) -> list[bytes]:
        """Return the hashes of the pages that a sequence may share."""
        # At least one token is left to compute, since the next one is drawn from its logits.
        return seq.hashes[: (seq.length - 1) // pool.page_size]

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        """Take pages for `tokens` tokens of a sequence that joins; return False if too few are free.

        Tokens in the prefix cache count as computed. A sequence that joins again is not counted as a query again.
        """
        if self._pool is None:
            return True
        if not self._pool.can_ever_hold(seq.total):  # it could not grow to its end even alone
            return False
        query = 0 if seq.preemptions else len(seq.prompt_ids)
        findable = self._findable(seq, self._pool)
        while (reserved := self._pool.reserve(findable, tokens, query)) is None:
            held = [page for _, pages in self.pins.values() for page in pages]
            if not held or self._pool.pages_for(tokens) > self._pool.room(findable, held):
                return False  # not even with all pinned pages
            self._unpin(next(iter(self.pins)))
        seq.pages, seq.computed = reserved
        found = seq.computed // self._pool.page_size
        if len(findable) > found:
            self._pool.announce(seq.pages[found:], findable[found:], seq)
        if not seq.preemptions:
            seq.cached = seq.computed
        self._watch_growing(seq)
        self._unpin((seq.program, seq.session))
        return True

    def pin(self, seq: Sequence, until: float) -> None:
        """Keep the cached pages of a sequence that has left until its session's next call joins, or until this time."""
        if self._pool is not None:
            key = seq.program, seq.session
            before, pages = self.pins.pop(key, (until, []))
            self.pins[key] = max(before, until), pages + self._pool.hold(seq.hashes)

    def unpin(self, now: float | None = None) -> None:
        """Release the pins whose time has passed; without a time, all."""
        for key in [key for key, (until, _) in self.pins.items() if now is None or until < now]:
            self._unpin(key)

    def _unpin(self, key: tuple[str, str] | None) -> bool:
        """Release the pin of a session; return False if there is none."""
        if self._pool is None or key not in self.pins:
            return False
        self._pool.release(self.pins.pop(key)[1])
        return True

    @property
    def pinned(self) -> set[int]:
        """The pages that are pinned."""
        return {page for _, pages in self.pins.values() for page in pages}

    def _watch_growing(self, seq: Sequence) -> None:
        tokens = len(seq.pages) * self.page_size
        if tokens < seq.total:
            self._watch(seq, max(1, tokens - seq.length))

    def outgrown(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences that need one more page before the next step.

        Called before each step, unless it is not in `due`: then `step` is counted without it.
        """
        self.step += 1
        due = self.due.pop(self.step, None)
        if due is None or self._pool is None:
            return []
        short = []
        for seq in due:
            # An entry is stale if its sequence has left or is due later. One that has paused has tokens to spare.
            if self._watched.get(seq) == self.step and seq.finish_reason is None:
                spare = len(seq.pages) * self._pool.page_size - seq.length
                if spare <= 0:
                    short.append(seq)
                self._watch(seq, spare if spare > 0 else self._pool.page_size)
        # Those that joined first get pages first, whatever the order in which they became due.
        return sorted(short, key=running.index) if len(short) > 1 else short

    def look_again(self, sequences: list[Sequence]) -> None:
        """Have the next call of `outgrown` look at these sequences, too."""
        for seq in sequences:
            self._watch(seq, 1)

    def _watch(self, seq: Sequence, tokens: int) -> None:
        """Look at a sequence again when it may have so many more tokens; a step without drafts appends one at most."""
        step = self.step + tokens
        if self._watched.get(seq) != step:
            self._watched[seq] = step
            self.due.setdefault(step, []).append(seq)

    def lend(self, seq: Sequence, drafts: int) -> int:
        """Give a sequence pages for the drafts of one step; return for how many of them the free ones suffice."""
        pool = self._pool
        if pool is None:
            return drafts
        self.lent.setdefault(seq, len(seq.pages))
        # One token more, as always: it belongs to the next step, which a runner may launch before this one is committed.
        while drafts and len(seq.pages) * pool.page_size < min(seq.length + 1 + drafts, seq.total):
            if pool.free:
                seq.pages.append(pool.take())
            else:
                drafts = max(0, len(seq.pages) * pool.page_size - seq.length - 1)
        return drafts

    def settle(self) -> None:
        """Take back the pages of the drafts that were wrong; called after each step that may have had drafts."""
        for seq, before in self.lent.items():
            assert self._pool is not None
            # Pages that it had before are its own, even if it does not need them yet: it joined with them.
            needed = max(before, self._pool.pages_for(min(seq.length + 1, seq.total)))
            if needed < len(seq.pages):
                self._pool.release(seq.pages[needed:])
                del seq.pages[needed:]
            if seq.finish_reason is None:
                self._watch_growing(seq)
        self.lent.clear()

    def grow(self, seq: Sequence) -> bool:
        """Give a sequence one more page; return False if none is free."""
        if self._pool is None:
            return True
        while not self._pool.free:
            if not self._unpin(next(iter(self.pins), None)):
                return False
        seq.pages.append(self._pool.take())
        return True

    def steps_without_shortage(self, sequences: list[Sequence], most: int) -> int:
        """Return for how many steps, up to `most`, the free pages suffice if each sequence decodes in all of them."""
        if self._pool is None or not self.due:  # all have the pages of their last step
            return most
        size, free = self._pool.page_size, self._pool.free
        # How many tokens fit into the pages of each, and how many it may get, beside the token that it gets now.
        rows = [(len(seq.pages) * size - seq.length - 1, seq.total - seq.length - 1) for seq in sequences]

        def suffice(steps: int) -> bool:
            ends = [(min(steps - 1, rest), spare) for spare, rest in rows]
            return sum(-((spare - end) // size) for end, spare in ends if end > spare) <= free

        # More steps never need fewer pages, so the number is found by halving. All have the pages of the first step.
        if suffice(most):
            return most
        fewest = 1
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if suffice(middle):
                fewest = middle
            else:
                most = middle - 1
        return most

    def catch_up(self, sequences: list[Sequence], more: int) -> None:
        """Give sequences the pages of the tokens that they got in several steps at once, and of so many more."""
        if self._pool is not None and self.due:
            # Their entries name steps that have passed at once, in which nobody looked.
            self.due.clear()
            self._watched.clear()
            for seq in sequences:
                missing = self._pool.pages_for(min(seq.length + more, seq.total)) - len(seq.pages)
                seq.pages += [self._pool.take() for _ in range(missing)]
                self._watch_growing(seq)

    def publish(self, seq: Sequence) -> None:
        """Let later sequences find the full pages of this one that are computed."""
        pool = self._pool
        if pool is None or not pool.prefix_cache:
            return
        full = seq.computed // pool.page_size
        known = len(seq.hashes)
        if full > known:
            start = known * pool.page_size
            seq.hashes = seq.hashes + pool.chain(
                seq.hashes, seq.tokens(start, full * pool.page_size - start), seq.cache_salt
            )
        if not full:
            return
        pool.publish(seq.pages[:full], seq.hashes[:full])
        if pool.writers:
            for page in seq.pages[:full]:
                if pool.writers.get(page) is seq:
                    del pool.writers[page]

    def _awaited(self, seq: Sequence, pool: PagePool) -> Sequence | None:
        """Return the writer of the last page that a sequence found, until the sequence computes something itself."""
        pages, rest = divmod(seq.computed, pool.page_size)
        writer = pool.writers.get(seq.pages[pages - 1]) if pages and not rest and seq.pages else None
        return None if writer is seq else writer

    def sound(self, seq: Sequence) -> int:
        """Return how many tokens of a running sequence are computed, without those for which it waits."""
        tokens = seq.computed
        while self._pool is not None and self._pool.writers and (writer := self._awaited(seq, self._pool)) is not None:
            seq, tokens = writer, min(tokens, writer.computed)
        return tokens

    def sharers(self, plan: Plan) -> tuple[list[Sequence], list[Sequence]]:
        """Return those in a plan that need pages which it computes, and those that need pages which it does not compute."""
        pool, readers, early = self._pool, list[Sequence](), list[Sequence]()
        if pool is None or not pool.writers:
            return readers, early
        ends: dict[Sequence, int] = {}
        for seq, count in zip(plan.sequences, plan.counts):
            writer = self._awaited(seq, pool)
            if writer is not None and writer.computed < seq.computed:
                if ends.get(writer, 0) < seq.computed:
                    early.append(seq)
                    continue
                readers.append(seq)
            # Kernels write keys and values before any row reads them only for pieces of at least a page.
            ends[seq] = seq.computed + count if count >= pool.page_size else 0
        return readers, early

    def hand_over(self, running: list[Sequence]) -> None:
        """Hand the pages that a departed sequence did not compute to the first sequence that found them."""
        pool = self._pool
        if pool is None or not self._abandoned:
            return
        left = self._abandoned & pool.writers.keys()  # pages that no other sequence shares were hidden when released
        self._abandoned = set()
        sharers = [seq for seq in running if not left.isdisjoint(seq.pages)]
        for seq in sharers:
            if self._awaited(seq, pool) is None:  # it has read them, so the writer failed behind them
                for page in left.intersection(seq.pages):
                    left.remove(page)
                    del pool.writers[page]
        for seq in sharers:
            own = [page for page in seq.pages if page in left]
            if own:
                left.difference_update(own)
                pool.writers.update(dict.fromkeys(own, seq))
                lost = len(own) * pool.page_size
                seq.computed -= lost
                if not seq.preemptions:
                    seq.cached -= lost
                    pool.hit_tokens -= lost

    def release_unseen(self, sequences: list[Sequence]) -> None:
        """Give back the pages that no layer reads again, after a step that computed some of these sequences."""
        pool = self._pool
        if pool is None:
            return
        for seq in sequences:
            # A held sequence computes its last token again, and kernels begin at whole pairs of pages.
            end = (seq.computed - pool.window) // pool.page_size - 1
            if end > 0 and seq.pages and seq.pages[end - 1]:
                self._publish_sound(seq)
                pool.release(seq.pages[:end])
                seq.pages[:end] = [0] * end

    def release(self, seq: Sequence) -> None:
        """Give the pages of a sequence back."""
        if self._pool is None or not seq.pages:
            return
        self._watched.pop(seq, None)
        self.lent.pop(seq, None)
        self._publish_sound(seq)
        if self._pool.writers:
            self._abandoned.update(page for page in seq.pages if self._pool.writers.get(page) is seq)
        self._pool.release(seq.pages, seq)
        seq.pages = []

    def _publish_sound(self, seq: Sequence) -> None:
        # The pages of a step that failed may hold anything. A prompt that is being scored is computed whole when it
        # joins again, so it must not find itself.
        if seq.error is None and (seq.output_ids or not seq.prompt_details):
            self.publish(seq)
