"""How a worker's open requests end when it shuts down: answered within a time, or failed at once if nothing answers them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from api.service import Service
from scheduling.lasting import LastingCall

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
QUICK_SECONDS = 1.5  # to answer the open requests on SIGINT or SIGQUIT
HANG_SECONDS = 1.0  # for which one call of a policy's hook lasts until no request is waited for: it takes microseconds


def drain(service: Service, seconds: float, looks: int = 0) -> None:
    """Wait until all requests are answered, and for this many `looks` that find none.

    They are counted, as a busy machine lets much time pass between two of them. A second before `seconds` are over, or
    when a hook hangs, fail the rest.
    """
    # The last second is for the errors of the rest to reach their clients.
    end, call = time.monotonic() + seconds - 1.0, LastingCall()
    # Batches have no client that waits: the next process computes what is left of them.
    if service.batches is not None:
        service.batches.stop()
    idle = 0
    while time.monotonic() < end and (service.registry.open or idle < looks):
        idle = 0 if service.registry.open else idle + 1
        time.sleep(POLL_SECONDS)
        if service.engine is not None and call.look(service.engine.manager.frame, POLL_SECONDS) >= HANG_SECONDS:
            log.error("%s, does not return, so the open requests end with an error", call.place)
            end = time.monotonic()
    service.stop()
    while service.registry.open and time.monotonic() < end + 0.5:
        time.sleep(POLL_SECONDS)


def exit_at_once(service: Service | None, unanswered: Callable[[], bool]) -> None:
    """Fail all requests, give their handlers a moment to write the errors, and exit without waiting for a thread."""
    end = time.monotonic() + QUICK_SECONDS
    try:
        if service is not None:
            service.draining = True
            service.stop()
            while unanswered() and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            service.access_log.flush(max(0.0, end - time.monotonic()))
    finally:
        os._exit(0)
