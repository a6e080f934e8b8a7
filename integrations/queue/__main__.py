"""`./eb queue POLICY --upstream URL --slots N`: hold requests for other servers until SIGTERM or SIGINT."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it serves, Ctrl-C ends it at once and without a traceback

import asyncio
import os
import socket
import sys
from collections.abc import Sequence

from api.http import large
from integrations.queue import options
from integrations.queue.door import bind, fail, note, serve
from integrations.queue.options import Plan
from integrations.queue.server import Queue
from terminal.options import UsageError


def main(argv: Sequence[str] | None = None) -> None:
    """Serve; exit with 2 if the command line or the address is wrong, and with 1 if the loop died."""
    large.free_at_once()
    deaths: list[str] = []

    def die(reason: str) -> None:
        deaths.append(reason)
        note(f"error: {reason}")
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        plan = options.parse(sys.argv[1:] if argv is None else argv)
        sock = bind(plan.config.host, plan.config.port)
        queue = Queue(plan.config, plan.sites, plan.settings, die)
    except (UsageError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot listen: {error.strerror or error}. Use another --host or --port")
    asyncio.run(_serve(plan, queue, sock))
    if deaths:  # so that a supervisor starts it again
        raise SystemExit(1)


async def _serve(plan: Plan, queue: Queue, sock: socket.socket) -> None:
    stop = asyncio.Event()

    def drain() -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends at once
        if queue.open:
            note(f"finishing {queue.open} open requests. Press Ctrl-C to stop at once")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, drain)
    names = ", ".join(f"{site.name} ({site.slots} at once)" for site in plan.sites.all)
    where = f"queueing at http://{plan.config.address}/ for {names} under {queue.manager.policy_name}"
    for text in (*plan.notes, where):
        note(text)
    await serve(queue, sock, stop)


if __name__ == "__main__":
    main()
