"""Completing inferences and notifying those who record them: no failure of one affects the others.

This module must not know HTTP, threads, or how requests are scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec

from scheduling.iteration import Iteration
from serving.inference import Inference, failure

log = logging.getLogger(__name__)

Observer = Callable[[Iteration | None, list[Inference]], None]
Listener = Callable[[Inference], None]
P = ParamSpec("P")


def notify(callbacks: Iterable[Callable[P, None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call each callback; log its exception and go on."""
    for callback in callbacks:
        try:
            callback(*args, **kwargs)
        except Exception:
            log.exception("%s failed", getattr(callback, "__qualname__", callback))


def complete(inferences: list[Inference]) -> None:
    """End each inference with its sequence's error, if there is one."""
    for inference in inferences:
        try:
            inference.finished(failure(inference.sequence.error))
        except Exception:
            log.exception("cannot complete an inference")


def publish_tokens(inference: Inference) -> None:
    """Publish an inference's tokens to the reader of its stream; cancel it if that fails."""
    try:
        inference.publish_tokens()
    except Exception as error:
        log.exception("cannot notify the reader of a stream")
        inference.cancel(failure(error))
