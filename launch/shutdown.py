"""How a worker's open requests end when it shuts down: answered within a time, or failed at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from api.service import Service

POLL_SECONDS = 0.02
QUICK_SECONDS = 1.5  # to answer the open requests on SIGINT or SIGQUIT


def drain(service: Service, seconds: float) -> None:
    """Wait until all requests are answered; a second before `seconds` are over, fail the rest."""
    end = time.monotonic() + seconds - 1.0
    if service.batches is not None:
        service.batches.stop()  # the next process computes the rest
    while service.requests.open and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    service.stop()
    while service.requests.open and time.monotonic() < end + 0.5:
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
