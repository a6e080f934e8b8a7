"""Which program a request serves, which calls it goes on from, and what each program has received, in bounded memory.

A program is named, or else it is the program of the session, of the session that started this one, or one of the session's
own name. Parents are inferred, from calls that were answered before the request came: the last ones of its session, and of
the sessions that this one started; for a session's first call those of the session that started it, or else of the whole
program. The programs and sessions used last are kept, and no name is refused. This module must not know HTTP or policies.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from scheduling.latest import Latest
from scheduling.sequence import PROGRAM_HEADERS as PROGRAM_HEADERS
from serving.call import Call
from serving.inference import Inference

MOST_LAST = 32  # calls of a program that no answered call goes on from


@dataclass(slots=True)
class Account:
    """What the ended calls of a program have received, in tokens, and the `last` of them, which none goes on from, by id."""

    calls: int = 0
    prompt_tokens: int = 0  # that were computed, once
    output_tokens: int = 0
    last: Latest[str, Call] = field(default_factory=lambda: Latest(MOST_LAST))


class Programs:
    """The accounts of programs; requests come in the threads of their handlers, and end in that of the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accounts = Latest[str, Account]()
        # By session with another name than its program: its program, and the session that started it.
        self._sessions = Latest[str, tuple[str, str]]()

    def begin(self, program: str = "", session: str = "", parent: str = "") -> Call | None:
        """Return a request with these names as a call, None for one without any."""
        if not (program or session or parent):
            return None
        with self._lock:
            known, started_by = self._sessions.get(session, ("", ""))
            parent = parent or started_by
            name = program or known or self._sessions.get(parent, (parent, ""))[0] or session
            if session and (session != name or parent):
                self._sessions[session] = name, parent
            account = self._accounts[name] = self._accounts.get(name) or Account()
            last = account.last
            own = [id for id, call in last.items() if session and session in (call.session, call.parent)]
            before = own or [id for id, call in last.items() if parent and call.session == parent] or [*last]
            depth = 1 + max((last[id].depth for id in before), default=0)
        return Call(name, session, parent, depth, tuple(before))

    def charge(self, inference: Inference, call: Call) -> None:
        """Charge a request that has left, a call of a program, to the program; called in the loop's thread."""
        with self._lock:
            if (account := self._accounts.get(call.program)) is not None:
                _charge(account, inference, call)

    def describe(self, call: Call) -> dict[str, Any]:
        """Return the program of a call with what its ended calls have received, as far as it is remembered."""
        account = self._accounts.get(call.program) or Account()
        received = {name: getattr(account, name) for name in ("calls", "prompt_tokens", "output_tokens")}
        return {"name": call.program, "depth": call.depth, "after": call.after, **received}


def _charge(account: Account, inference: Inference, call: Call) -> None:
    seq = inference.sequence
    account.calls += 1
    if inference.first is None:  # a copy receives nothing
        computed = min(max(seq.computed, seq.recompute_until), len(seq.prompt_ids))
        account.prompt_tokens += max(0, computed - seq.cached)
        account.output_tokens += len(seq.output_ids)
    if inference.error is None and seq.error is None:
        for id in call.after:
            account.last.pop(id, None)
        account.last[inference.id] = call._replace(after=())
