"""The first cases of the check on one policy, within a moment: `python -m simulate.laws.first NAME SECONDS OPTIONS`.

A server starts this by name before it serves a policy of the user's own. It prints the law that a case breaks, or the hook
that does not return; nothing if all is well or the time is over.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial

import policies
from scheduling.lasting import LastingCall
from simulate.laws.cases import make_cases
from simulate.laws.check import Verdict
from simulate.laws.laws import Broken
from simulate.laws.purity import check_purity
from simulate.laws.trial import try_case

CASES = 40
LOOK_EVERY = 0.05  # seconds


def problem(name: str, seconds: float, options: Mapping[str, object] | None = None) -> str:
    """Return the problem of a policy that is found within `seconds`, or ""."""
    results: list[str] = []
    end = time.monotonic() + seconds

    def work() -> None:
        make = partial(policies.policy_maker(name), options=options)
        try:
            check_purity(make(4))
            for case in make_cases(CASES, 0):
                if time.monotonic() > end:
                    break
                try_case(make, case, twice=False)
            results.append("")
        except Broken as broken:
            results.append(str(Verdict(name, CASES, broken=broken)).partition("\n")[0].rstrip("."))

    thread = threading.Thread(target=work, daemon=True)  # because a hook may never return
    thread.start()
    call, looked = LastingCall(), time.monotonic()
    while not results and looked < end:
        thread.join(LOOK_EVERY)
        passed, looked = time.monotonic() - looked, time.monotonic()
        call.look(sys._current_frames().get(thread.ident or 0), passed)
    if results:
        return results[0]
    # On a slow machine, the time may be over amid the cases: only a call that has lasted is a problem.
    return f"{call.place}, has not returned for a while" if call.seconds > seconds / 4 else ""


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # what a policy prints is no problem of it
        found = problem(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.write(found)
    sys.stdout.flush()
    os._exit(0)  # the thread may never end
