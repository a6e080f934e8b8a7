"""The pool of KV pages and its prefix cache: bookkeeping of numbers, no tensors.

A sequence gets pages when it joins, and more as it grows. Full pages, of prompts and of answers, are published under a
hash chain of their tokens, and a later sequence that begins with the same tokens shares them. Those of a prompt are found
as soon as a sequence has joined that will compute them. Page 0 is never reserved: padding rows point at it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from scheduling.eviction import UNKNOWN, Eviction, Ranking
from scheduling.sequence import Sequence


def pages_for(tokens: int, page_size: int) -> int:
    """Return how many pages hold a number of tokens."""
    return -(-tokens // page_size)


def in_whole_pages(tokens: int, page_size: int) -> int:
    """Round a number of tokens up to whole pages."""
    return pages_for(tokens, page_size) * page_size


class PagePool:
    """`n_pages` pages of `page_size` tokens each; page 0 is never reserved.

    `salt` is what makes keys and values differ between pools: model and dtype. `evict` says which page that can still be
    found goes first, if not the least recently used. A model reads the last `window` tokens at most, or all for 0: where
    a sequence has given back a page before them, its list has page 0.
    """

    def __init__(
        self, n_pages: int, page_size: int, *, prefix_cache: bool = True, salt: str = "", evict: Eviction | None = None,
        window: int = 0,
    ) -> None:  # fmt: skip
        if n_pages < 2:
            raise ValueError(f"a pool of {n_pages} pages holds no sequence; at least 2 are needed. Raise --kv-memory")
        self.page_size, self.window = page_size, window
        self.prefix_cache = prefix_cache
        self.total = n_pages - 1
        self.query_tokens = 0
        self.hit_tokens = 0
        self._is_fixed = False  # what it finds never changes
        self._salt = hashlib.sha256(salt.encode()).digest()
        self._references = [0] * n_pages
        self._key: list[bytes | None] = [None] * n_pages
        self._by_key: dict[bytes, int] = {}
        self.writers: dict[int, Sequence] = {}  # of pages that are found, but not known to be computed yet
        self.evict = evict or Eviction()
        self._ranks = evict is not None and evict.ranks and prefix_cache
        self._worth = [UNKNOWN] * n_pages
        self._blank = list(range(n_pages - 1, 0, -1))  # free pages without findable content, taken from the end
        # Free pages that are found, with their worth: in the order in which they go, the least recently used first.
        self._cached: OrderedDict[int, float] = Ranking() if self._ranks else OrderedDict()

    @property
    def free(self) -> int:
        """Pages that can be reserved, including cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Free pages whose content can still be found; other threads read it, too."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - len(self._blank) - len(self._cached)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def can_ever_hold(self, tokens: int) -> bool:
        return tokens <= self.total * self.page_size

    def hashes(self, tokens: list[int], salt: str = "") -> list[bytes]:
        """Return the hash chain of the full pages of a prompt, without the page of its last token.

        At least one token is left to compute, since its logits are needed. Chains with different salts share nothing.
        """
        full = (len(tokens) - 1) // self.page_size
        return self.chain([], tokens[: full * self.page_size], salt) if full > 0 else []

    def chain(self, hashes: list[bytes], tokens: list[int], salt: str = "") -> list[bytes]:
        """Return how a hash chain goes on with the full pages of more tokens; `salt` is that of its beginning."""
        if not self.prefix_cache:
            return []
        first = hashlib.sha256(self._salt + salt.encode()).digest() if salt else self._salt
        return list(self._chain(hashes[-1] if hashes else first, array("I", tokens)))

    def _chain(self, key: bytes, tokens: array[int]) -> Iterator[bytes]:
        size = self.page_size
        for start in range(0, len(tokens) // size * size, size):
            key = hashlib.sha256(key + tokens[start : start + size].tobytes()).digest()
            yield key

    def cached_tokens(self, hashes: list[bytes]) -> int:
        """Return how many tokens at the head of this chain are in the cache now."""
        return len(self._match(hashes)) * self.page_size

    def _match(self, hashes: list[bytes]) -> list[int]:
        pages: list[int] = []
        is_coming = False
        for key in hashes:
            page = self._by_key.get(key)
            # Pages to come are the last of those found: who computes the last of them waits for the others.
            if page is None or (is_coming and page not in self.writers):
                break
            is_coming = page in self.writers
            pages.append(page)
        return pages

    def shareable(self, hashes: list[bytes], tokens: int) -> list[int] | None:
        """Return the cached pages that `tokens` tokens would share; None when too few are free for the others."""
        hits = self._match(hashes)
        fresh = self.pages_for(tokens) - len(hits)
        return None if fresh > self.free - [self._references[p] for p in hits].count(0) else hits

    def reserve(self, hashes: list[bytes], tokens: int, prompt_tokens: int = 0) -> tuple[list[int], int] | None:
        """Take pages for `tokens` tokens; return (pages, cached tokens), or None when there are too few.

        With `prompt_tokens`, they and those that are cached are counted.
        """
        # Sharing is legal because a shared page is never written: it is full, its keys and values depend only on
        # the tokens up to their position, which the chain hashes, and a sequence writes behind its cached tokens.
        hits = self.shareable(hashes, tokens)
        if hits is None:
            return None
        fresh = self.pages_for(tokens) - len(hits)
        for page in hits:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1
        if self.prefix_cache and prompt_tokens:
            self.query_tokens += prompt_tokens
            self.hit_tokens += len(hits) * self.page_size
        return hits + [self.take() for _ in range(fresh)], len(hits) * self.page_size

    def take(self) -> int:
        """Take the free page that is worth least; KeyError when there is none."""
        page = self._blank.pop() if self._blank else self._forget()
        self._references[page] = 1
        self._worth[page] = UNKNOWN
        return page

    def publish(self, pages: list[int], hashes: list[bytes]) -> None:
        """Let later sequences find the content of `pages`, whose keys and values must be computed."""
        if self._is_fixed:
            return
        for page, key in zip(pages, hashes):
            # Of two pages with the same content, computed side by side, only the first can be found.
            if page and self._key[page] is None and self._by_key.setdefault(key, page) == page:
                self._key[page] = key

    def announce(self, pages: list[int], hashes: list[bytes], writer: Sequence) -> None:
        """Let later sequences find `pages` that `writer` will compute, up to the first whose content is known."""
        if self._is_fixed or not self.prefix_cache:
            return
        for page, key in zip(pages, hashes):
            if self._by_key.setdefault(key, page) != page:
                return
            self._key[page], self.writers[page] = key, writer

    def pin(self, prompts: Iterable[list[int]], count: int, longest: int) -> list[Sequence]:
        """Cache the `count` pages with which most of the prompts begin, and no others from now on.

        Of equally common pages, the first seen win. Return a sequence for each page: compute its next `page_size` tokens
        after the sequences before it. ValueError if a request of `longest` tokens would no longer fit.
        """
        seen: Counter[bytes] = Counter()
        begins: dict[bytes, tuple[list[int], int]] = {}
        for prompt in prompts:
            hashes = self.hashes(prompt[:longest])
            seen.update(hashes)
            begins.update((key, (prompt, depth)) for depth, key in enumerate(hashes, 1))
        # A page sorts after the pages that precede it in a prompt: these are at least as common and were seen first.
        kept = [key for key, _ in seen.most_common(count)]
        if len(kept) > (room := self.total - self.pages_for(longest)):
            raise ValueError(
                f"--pinned-pages is {count:,}, but a request of {longest:,} tokens leaves {room:,} of {self.total:,}. "
                f"Use {room:,} or fewer, or more KV memory"
            )
        for key in kept:
            self.publish([self.take()], [key])  # this reference is never given back
        self.total -= len(kept)
        self._is_fixed = True
        size, rows = self.page_size, [begins[key] for key in kept]
        return [
            Sequence(p[: n * size + 1], 1, pages=self._match(self.hashes(p)[:n]), computed=(n - 1) * size)
            for p, n in rows
        ]

    def hold(self, hashes: list[bytes]) -> list[int]:
        """Keep the computed pages of a chain from eviction until their `release`; return them."""
        held: list[int] = []
        for page in self._match(hashes):
            if page in self.writers:
                break
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1
            held.append(page)
        return held

    def room(self, hashes: list[bytes], held: Iterable[int] = ()) -> int:
        """Return how many pages a sequence with this chain could get: the free ones, and those in use that it shares.

        With the pages that `hold` returned, count those that their `release` would free, too.
        """
        shared = self._match(hashes)
        freed = [page for page, count in Counter(held).items() if self._references[page] == count]
        return self.free + sum(self._references[page] > 0 for page in shared) + len({*freed}.difference(shared))

    def release(self, pages: list[int], seq: Sequence | None = None) -> None:
        """Free the pages of a sequence that leaves; pages that cannot be found are reused first."""
        if self._ranks and seq is not None:
            for page, worth in zip(pages, self.evict.worths(seq, [self._worth[page] for page in pages])):
                self._worth[page] = worth
        # From the end: a page is found only through those before it, so a prefix must be forgotten after its tail.
        for page in filter(None, reversed(pages)):
            assert self._references[page] > 0, f"page {page} is freed twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self.writers:
                    self._hide(page)
                if self._key[page] is None:
                    self._blank.append(page)
                else:
                    self._cached[page] = self._worth[page]

    def _forget(self) -> int:
        """Forget the content of the page that goes first among the cached ones; return it."""
        page, worth = self._cached.popitem(last=False)
        self._hide(page)
        if self._ranks:
            self.evict.on_evict(worth)
        return page

    def _hide(self, page: int) -> None:
        """Remove a page from the prefix cache's index, so that no later sequence finds it."""
        key = self._key[page]
        assert key is not None
        del self._by_key[key]
        self._key[page] = None
        self.writers.pop(page, None)
