"""Broken parts that armed faults put into an engine: a request's text, its notification, and a log's stream.

This module must not know which faults exist.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

from serving.inference import Inference, InferenceError


class BrokenText:
    """The text of an answer, which fails when it is decoded."""

    stop_reason: str | int | None = None

    def __init__(self, text: Any) -> None:
        self.watches = bool(text is not None and text.watches)

    def feed(self, token: Any) -> Any:
        raise ValueError("an armed fault: bad_detokenize")

    def text(self, output_ids: list[int]) -> str:
        raise ValueError("an armed fault: bad_detokenize")

    def growing(self, follows_tokens: bool = False) -> BrokenText:
        return self

    def rest(self, whole: str) -> str:
        raise ValueError("an armed fault: bad_detokenize")

    @property
    def shown_tokens(self) -> int:
        return 0


def lose_event(inference: Inference) -> None:
    """Lose the first notification that the inference has ended."""

    def lost(error: InferenceError | None = None) -> bool:
        del inference.finished
        return False

    inference.finished = lost  # type: ignore[method-assign]


def raise_in_sink(iteration: Any, left: list[Inference]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyStream:
    """A stream to a full disk, or to a reader that never reads."""

    def __init__(self, blocks: bool) -> None:
        self._blocks = blocks

    def write(self, text: str) -> int:
        if self._blocks:
            threading.Event().wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Do nothing: all output is lost."""
