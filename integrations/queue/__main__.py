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
from typing import NoReturn

from api.http import large
from integrations.queue import options
from integrations.queue.door import bind, serve
from integrations.queue.options import Plan
from integrations.queue.server import Queue
from terminal.options import UsageError


def main(argv: Sequence[str] | None = None) -> None:
    """Serve; exit with 2 if the command line or the address is wrong, and with 1 if the loop died."""
    large.free_at_once()
    deaths: list[str] = []

    def die(reason: str) -> None:
        deaths.append(reason)
        print(f"error: {reason}", file=sys.stderr, flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        plan = options.parse(sys.argv[1:] if argv is None else argv)
        sock = bind(plan.config.host, plan.config.port)
        queue = Queue(plan.config, plan.sites, plan.settings, die)
    except (UsageError, ValueError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot listen: {error.strerror or error}. Use another --host or --port")
    asyncio.run(_serve(plan, queue, sock))
    if deaths:  # so that a supervisor starts it again
        raise SystemExit(1)


async def _serve(plan: Plan, queue: Queue, sock: socket.socket) -> None:
    service, stop = queue.service, asyncio.Event()
    service.serves = not sys.stdout.isatty()
    service.access_log.start()
    sys.stdout = sys.stderr  # what a policy prints is no access log

    def drain() -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends at once
        if queue.open:
            print(f"finishing {queue.open} open requests. Press Ctrl-C to stop at once", file=sys.stderr, flush=True)  # noqa: T201

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, drain)
    names = ", ".join(f"{site.name} ({site.slots} at once)" for site in plan.sites.all)
    where = f"queueing at http://{plan.config.address}/ for {names} under {queue.manager.policy_name}"
    for text in (*plan.notes, where):
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    await serve(queue, sock, stop, plan.config.request_timeout)
    service.access_log.flush()


def _fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr, flush=True)  # noqa: T201
    raise SystemExit(2)


if __name__ == "__main__":
    main()
