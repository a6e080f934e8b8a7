"""A dict that forgets its oldest entries, so that clients cannot fill the memory by sending ever new names."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
KEPT = 4096


class Latest(OrderedDict[K, V]):
    """A dict of the `most` entries that were set last, the oldest first."""

    def __init__(self, most: int = KEPT) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, name: K, value: V) -> None:
        super().__setitem__(name, value)
        self.move_to_end(name)
        if len(self) > self.most:
            self.popitem(last=False)
