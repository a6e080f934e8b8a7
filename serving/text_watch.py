"""The watch over calls of the tokenizer and of the chat template, which come from files that may be anybody's.

A call that does not return holds a handler's thread, but neither the loop nor the interpreter, so nothing else would
notice it. This module must not know what a call does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serving.watchdog import Watch, Watched

TEXT_SECONDS = 30.0  # the largest text takes less than a second


class TextWatch(Watch):
    """Gives up the loop, so that the process starts again, when a call has lasted for twice `limit` seconds.

    `oldest` returns what identifies the oldest call in progress, None if there is none.
    """

    name, rest = "text-watch", ", which the model's tokenizer or chat template does not end"

    def __init__(
        self, oldest: Callable[[], object | None], loop: Watched, limit: float = TEXT_SECONDS, *more: Any
    ) -> None:
        self.look = oldest  # type: ignore[method-assign]
        super().__init__(loop, limit, *more)

    @property
    def words(self) -> str:
        return f"a text has been tokenized for {self.seconds:.0f} s"

    @property
    def stall(self) -> str | None:
        """The reason why no request is accepted, None while calls return in time."""
        return self.words if self.seconds >= self._limit else None
