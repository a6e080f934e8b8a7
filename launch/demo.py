"""The demonstration that `--demo` starts once the engine is ready: a load without end, made to be watched.

It must not know how requests are sent or shown; the settings that `--demo` changes are in `config.py`.
"""

from __future__ import annotations

from api.schemas.demo import LoadRequest
from api.service import Service

# Twice as many users as slots: under every policy some wait, and a static batch is always full.
LOAD = LoadRequest(users=16, pause=0.4, min_tokens=8, max_tokens=48, seed=1)


def begin(service: Service) -> None:
    """Start the load of the demonstration."""
    assert service.engine is not None
    assert service.load is not None
    service.load.start(service.engine, LOAD, service.wants_load)
