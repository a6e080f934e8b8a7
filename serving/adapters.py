"""The LoRA adapters of a server by name: which are known, which are in memory, and which leave it.

Any thread may ask. An adapter is read and prepared in the thread that asks for it, one at a time, and a request holds the
weights that it began with; so the loop never waits, and an adapter that is unloaded or replaced serves its requests to
their end. When the limit is reached, the adapter that was asked for least recently leaves, unless a request has it; its
name stays known, and it is read again when it is asked for. This module must not know tensors, files or HTTP.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
Problem = Literal["unknown", "exists", "broken", "full"]


class AdapterError(Exception):
    """An adapter that cannot be used; `problem` is the kind, the message has the reason and the remedy."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class Weights(Protocol):
    """A prepared adapter, which belongs to the model. digest: equal for equal numbers."""

    nbytes: int
    rank: int
    digest: str


@dataclass(frozen=True)
class Loaded:
    """An adapter in memory, as a request holds it."""

    name: str
    weights: Weights

    @property
    def salt(self) -> str:
        """What tells its KV pages from those of the model and of other adapters."""
        return f"adapter {self.weights.digest}"


@dataclass
class Entry:
    """A known adapter: where it comes from, and its weights while they are in memory."""

    name: str
    source: str
    loaded: Loaded | None = None
    used_at: float = 0.0
    added_at: float = field(default_factory=time.time)
    rank: int = 0
    nbytes: int = 0  # when it was last in memory


class AdapterStore:
    """Adapters of one model, of which at most `limit` bytes are in memory.

    `read` returns the weights of a source; it raises ValueError, OSError or MemoryError with the reason. `in_use` returns
    the weights of all queued and running requests. `reserved` are the model's names.
    """

    def __init__(
        self,
        read: Callable[[str], Weights],
        limit: int,
        reserved: Collection[str] = (),
        in_use: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.limit = limit
        self.in_use = in_use
        self.loads = 0
        self.evictions = 0
        self._read = read
        self._reserved = reserved
        self._entries: dict[str, Entry] = {}
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()  # also what only running requests hold
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # of the entries

    @property
    def nbytes(self) -> int:
        """The bytes of all adapters in memory, also of those that only running requests hold."""
        return sum(weights.nbytes for weights in list(self._alive))

    def entries(self) -> list[Entry]:
        """Return all known adapters in the order in which they were added."""
        with self._lock:
            return list(self._entries.values())

    def find(self, name: str) -> Entry | None:
        with self._lock:
            return self._entries.get(name)

    def check_name(self, name: str) -> None:
        """Raise AdapterError unless an adapter may have this name."""
        if not NAME.fullmatch(name) or name in self._reserved:
            reason = "is the name of the model" if name in self._reserved else "is no name for an adapter"
            raise AdapterError(
                "broken", f"{name[:128]!r} {reason}. Use up to 128 letters, digits and _ . : / - that name nothing else"
            )

    def add(self, name: str, source: str, replace: bool = False) -> None:
        """Read an adapter and make its name known; with `replace`, also in the place of another one."""
        self.check_name(name)
        with self._reading:
            if not replace and self.find(name) is not None:
                raise AdapterError(
                    "exists", f"the adapter {name!r} is already loaded. Unload it first, or send load_inplace: true"
                )
            loaded = self._load(name, source)
            entry = Entry(
                name, source, loaded, time.monotonic(), rank=loaded.weights.rank, nbytes=loaded.weights.nbytes
            )
            with self._lock:
                self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Forget an adapter; requests that have it go on."""
        with self._lock:
            if self._entries.pop(name, None) is None:
                raise self._unknown(name)

    def acquire(self, name: str) -> Loaded:
        """Return an adapter for a request, after reading it again if it is not in memory."""
        found = self._resident(name)
        if found is not None:
            return found
        with self._reading:
            found = self._resident(name)  # another request may have read it meanwhile
            entry = self.find(name)
            if found is not None or entry is None:
                return found or self.acquire(name)
            loaded = self._load(name, entry.source)
            with self._lock:
                entry.loaded, entry.used_at = loaded, time.monotonic()
                entry.rank, entry.nbytes = loaded.weights.rank, loaded.weights.nbytes
            return loaded

    def _resident(self, name: str) -> Loaded | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                raise self._unknown(name)
            entry.used_at = time.monotonic()
            return entry.loaded

    def _unknown(self, name: str) -> AdapterError:
        known = ", ".join(repr(other) for other in list(self._entries)[:20]) or "none is loaded"
        return AdapterError("unknown", f"there is no adapter {name[:128]!r} here. Use one of: {known}")

    def _load(self, name: str, source: str) -> Loaded:
        """Return an adapter that was read just now and fits into the limit."""
        try:
            weights = self._read(source)
        except (ValueError, OSError, MemoryError) as error:
            raise AdapterError("broken", f"cannot load the adapter {name!r}: {error}") from error
        self._make_room(name, weights)
        self.loads += 1
        self._alive.add(weights)
        return Loaded(name, weights)

    def _make_room(self, name: str, weights: Weights) -> None:
        """Let adapters leave, the least recently used first, until there is room; raise AdapterError if there is none."""
        kept = {id(used) for used in self.in_use() if used is not None}
        while self.nbytes + weights.nbytes > self.limit:
            with self._lock:
                idle = [e for e in self._entries.values() if e.loaded is not None and id(e.loaded.weights) not in kept]
                if not idle:
                    break
                least = min(idle, key=lambda entry: entry.used_at)
                least.loaded = None
            self.evictions += 1
        if self.nbytes + weights.nbytes > self.limit:
            raise AdapterError(
                "full",
                f"the adapter {name!r} has {weights.nbytes / 2**20:.1f} MiB, but of the {self.limit / 2**20:.1f} MiB for "
                f"adapters {self.nbytes / 2**20:.1f} are in use by requests. Try again later, or raise --adapter-memory",
            )
