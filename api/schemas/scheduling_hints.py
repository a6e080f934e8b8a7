"""The fields that tell scheduling orders about a request, in every dialect: ours, beside the dialect's own."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas import fields as f
from api.schemas.unsupported import Refusing

# The fields that have no effect unless the order or the eviction uses them, and the names by which these know them.
HINTS = {"priority": "priority", "slo_s": "deadline", "session": "session", "keep_s": "keep_s"}


class SchedulingHints(Refusing):
    """The client, priority and deadline of a request, which orders such as vtc, priority and edf use.

    Its session and the seconds after which it goes on are for `--evict`.
    """

    user: f.Name = Field("", description=f.USER)
    priority: f.Int64 = Field(0, description=f"{f.SEED}; lower values are served first")
    slo_s: f.Seconds | None = Field(None, description=f.SECONDS)
    session: f.Name = Field("", description=f.USER)
    keep_s: f.Seconds | None = Field(None, le=3600, description=f"{f.SECONDS}, at most 3,600")

    def scheduling_options(self) -> dict[str, Any]:
        """Return these fields as options of `make_inference`."""
        return {
            "client": self.user, "priority": self.priority, "deadline": self.slo_s,
            "session": self.session, "keep_s": self.keep_s or 0.0,
        }  # fmt: skip
