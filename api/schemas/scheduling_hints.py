"""The fields that tell scheduling orders about a request, in every dialect: ours, beside the dialect's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from api.schemas import fields as f
from api.schemas.unsupported import Refusing
from serving.programs import PROGRAM_HEADERS

# The fields that have no effect unless the order or the eviction uses them, and the names by which these know them.
HINTS = {
    "priority": "priority", "slo_s": "deadline", "session": "session", "session_id": "session", "program": "program",
    "keep_s": "keep_s",
}  # fmt: skip
LONGEST_NAME = 256  # characters
# Headers that name a request's session, and the session that started it: of vLLM and OpenCode, Dynamo, Claude
# Code and Codex, and our own. The first one counts, after the fields of the body.
SESSION = ("X-Session-Id", "X-Dynamo-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Session-Id", "Session-Id")
PARENT = ("X-Dynamo-Parent-Session-Id", "X-Parent-Session-Id", "X-Claude-Code-Parent-Agent-Id")
KEYS = {name: f"HTTP_{name.upper().replace('-', '_')}" for name in (*PROGRAM_HEADERS, *SESSION, *PARENT)}  # in WSGI
NAMING = frozenset(KEYS.values())


def names_in(header: Callable[[str], str | None], program: str = "", session: str = "") -> dict[str, str]:
    """Return the program, the session, and the session that started it (`parent`), each empty where nothing names one."""

    def first(names: tuple[str, ...]) -> str:
        return next(filter(None, map(header, names)), "")[:LONGEST_NAME]

    return {"program": program or first(PROGRAM_HEADERS), "session": session or first(SESSION), "parent": first(PARENT)}


class SchedulingHints(Refusing):
    """The client, priority, deadline and program of a request, which orders such as vtc, priority, edf and plas use.

    Its session is for `--evict`, too, as are the seconds after which it goes on.
    """

    user: f.Name = Field("", description=f.USER)
    priority: f.Int64 = Field(0, description=f"{f.SEED}; lower values are served first")
    slo_s: f.Seconds | None = Field(None, description=f.SECONDS)
    session: f.Name = Field("", description=f.USER)
    session_id: f.Name = Field("", description=f.USER)
    program: f.Name = Field("", description=f.USER)
    keep_s: f.Pause | None = Field(None, description=f"{f.SECONDS}, at most 3,600")

    def scheduling_options(self, environ: Mapping[str, Any]) -> dict[str, Any]:
        """Return these fields as options of `make_inference`, with the names in the headers of a WSGI environment."""
        program, session = self.program, self.session or self.session_id
        names = {"program": program, "session": session, "parent": ""}
        if not NAMING.isdisjoint(environ):
            names = names_in(lambda name: environ.get(KEYS[name]), program, session)
        return {
            "client": self.user,
            "priority": self.priority,
            "deadline": self.slo_s,
            "keep_s": self.keep_s or 0.0,
            **names,
        }
