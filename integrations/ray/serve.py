"""`./eb fleet`: replicas of the server on Ray Serve, and the queue in front of them in this process."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from client.send.servers import APP
from integrations.queue.door import bind, fail, note, serve
from integrations.ray import options
from integrations.ray.options import Plan
from terminal.option_types import is_local
from terminal.options import UsageError

NOT_INSTALLED = "Ray is not installed. Run: dev/tools/setup.sh ray"


def main(argv: Sequence[str] | None = None) -> None:
    """Start the replicas and serve until SIGTERM or SIGINT; SIGHUP replaces the replicas one after the other."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        plan = options.parse(argv)
    except (UsageError, ValueError) as error:
        fail(str(error))
    if shlex.quote(sys.executable) != sys.executable:  # Ray would wait forever for its processes
        fail(
            f"Ray starts {sys.executable!r} in a shell without quotation marks, which fails for a space or a special "
            "character. Move the project to a folder whose path has neither, and delete its .venv"
        )
    # The server refuses a wrong policy in its own words, before Ray starts.
    if subprocess.run(
        [sys.executable, str(APP), "--print-config"], env={**os.environ, **plan.environment}, stdout=subprocess.DEVNULL
    ).returncode:
        raise SystemExit(2)
    try:
        sock = bind(plan.config.host, plan.config.port)  # before the replicas start, which takes a while
    except OSError as error:
        fail(f"cannot listen on {plan.config.address}: {error.strerror}. Use another --host or --port")
    try:
        from integrations.ray import ray_serve
    except ImportError as error:
        if str(error.name).partition(".")[0] not in ("ray", "aiohttp"):
            raise
        fail(NOT_INSTALLED)
    try:
        ray_serve.start(plan)
        asyncio.run(_serve(ray_serve, plan, sock))
    finally:
        ray_serve.disconnect()


async def _serve(ray_serve: Any, plan: Plan, sock: socket.socket) -> None:
    from integrations.ray.fleet_queue import FleetQueue

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def deploy() -> Any:
        return ray_serve.deploy(ray_serve.replicas(plan))

    def redeploy() -> None:
        note("replacing the replicas one after the other")
        loop.run_in_executor(None, deploy).add_done_callback(replaced)

    def replaced(done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if not stop.is_set():
            note(f"error: could not replace the replicas: {error}" if error else "all replicas are replaced")

    try:
        handle = deploy()
    except RuntimeError as error:
        await loop.run_in_executor(None, ray_serve.stop, plan)
        fail(str(error), 3)
    config = plan.config

    def die(reason: str) -> None:
        note(f"error: {reason}")
        os.kill(os.getpid(), signal.SIGTERM)

    queue = FleetQueue(plan, ray_serve.RayReplicas(handle), die)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, redeploy)
    note(f"serving at http://{config.address}/")
    if not config.api_key and not is_local(config.host):
        note(f"warning: anyone who can reach {config.address} may use it. Set EB_API_KEY, or use --host 127.0.0.1")
    try:
        await serve(queue, sock, stop)
    finally:  # the handle's router needs this loop for its own end
        await loop.run_in_executor(None, ray_serve.stop, plan)


if __name__ == "__main__":
    main()
