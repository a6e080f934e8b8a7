"""The promises of a policy beyond the laws that hold for all, and the exceptions that it is allowed.

`./eb simulate check` tests the promises and reports what is not allowed. A policy changes its claims at the end of
`__init__`: `self.claims = self.claims.but(patience=self.delay)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Claims:
    """Promises and permissions of one policy; the defaults are those of a plain continuous loop."""

    conserving: bool = True  # no slot stays empty while the next request fits; False for a policy with its own `admit`
    fair: bool = False  # backlogged clients get equal service, within the bound of VTC's theorem
    fair_within: float = 0.0  # service that each of two clients may be ahead or behind in addition, as by a quantum
    guard: float = inf  # seconds of waiting after which the oldest request goes first
    overtakes: float = inf  # seconds; no request joins before one that arrived longer than this before it
    # Tokens of requests that arrived later and may join before one that waits, beyond what `guard` (what joins until
    # then) and `overtakes` (what arrives within it) except. A policy without an `order` of its own claims 0.
    overtaking_tokens: float = inf
    patience: float = 0.0  # seconds that the oldest may wait for others in an idle engine; inf: until arrivals end
    refuses: bool = False  # `refuse` and `expires_at` may turn requests away
    refuses_only_late: bool = False  # what `refuse` turned away would have ended after its deadline
    holds: bool = False  # a finished request may keep its slot until its batch is done
    overruns: bool = False  # a batch may run on after all its members are done
    limits_kv: bool = False  # `blocked_by` may keep requests out by a KV limit below that of the pages
    # What the order goes by: client, priority, deadline, prefix, length. The server and the simulator warn the user
    # when requests do not differ in any of them, since only the order of arrival is left then.
    uses: tuple[str, ...] = ()

    def but(self, **changes: Any) -> Claims:
        """Return these claims with the changes."""
        return replace(self, **changes)

    def without_order(self) -> Claims:
        """Return the claims of a loop that forms groups of its own, so that its order cannot keep promises."""
        return self.but(fair=False, guard=inf, overtakes=inf, overtaking_tokens=inf, refuses_only_late=False)
