"""`python -m fleet.serve`: replicas of the server on Ray Serve, and the ingress in front of them in this process."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import config as settings
from client.options import Choice, Command, Number, Option, Read, UsageError, Values, read
from fleet import autoscalers
from fleet.autoscalers import Bounds
from fleet.routers import ROUTERS

NAME = "python -m fleet.serve"
INTRO = """Serve a language model by several replicas on Ray Serve. The settings of ./server.sh
apply to each replica; host and port are those of the ingress. For example:

\b
  python -m fleet.serve dynamic --model smollm2 --replicas 2..8"""
NOT_INSTALLED = "Ray is not installed. Run: tools/setup.sh requirements-ray.txt"


def bounds(text: str) -> Bounds:
    """Read 4, or 2..8 for autoscaling."""
    least, dots, most = text.partition("..")
    try:
        found = Bounds(int(least), int(most if dots else least))
    except ValueError:
        found = Bounds(0, 0)
    if not 1 <= found.least <= found.most <= 1000:
        raise ValueError(f"{text!r} is no number of replicas. Use N, or LEAST..MOST for autoscaling, such as 2..8")
    return found


def autoscaler(text: str) -> str:
    """Check the name and target of an autoscaler."""
    autoscalers.make(text)
    return text


FLEET = [
    Option("--replicas", "replicas: N, or LEAST..MOST for autoscaling", Read(bounds, "N"), default="2"),
    Option("--router", "how a replica is chosen for each request", Choice(ROUTERS), default="prefix-aware"),
    Option(
        "--autoscaler", "with LEAST..MOST: how many replicas there should be, such as tokens, tokens:0.6 or requests:8",
        Read(autoscaler, "NAME"), default="tokens",
    ),
    Option("--upscale-delay", "seconds for which more replicas must be wanted before they start", Number(0, kind=float), default=10.0),
    Option("--downscale-delay", "seconds for which fewer must be wanted before some end", Number(0, kind=float), default=120.0),
    Option("--address", "address of a Ray cluster, or auto; unset: start Ray on this machine", default=""),
    Option("--cpus", "CPU cores that Ray reserves for a replica; on one machine none", Number(0, kind=float), default=0.0),
    Option("--gpus", "GPUs that Ray reserves for a replica", Number(0, kind=float), default=0.0),
]  # fmt: skip


def build_command() -> Command:
    """Return the command line: the flags of the fleet and those of its servers."""
    return Command(NAME, INTRO, {"fleet": FLEET, **settings.command().sections})


def parse(argv: Sequence[str]) -> tuple[Values, settings.Loaded]:
    """Return the values of the fleet's flags, and the settings of its servers, which the other words set."""
    if {"-h", "--help"} & set(argv):
        read(build_command(), ["--help"])
    flags = {flag for option in FLEET for flag in option.opts}
    own: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag in flags:
            own += [word] if equals else [word, *islice(words, 1)]
        else:
            others.append(word)
    return read(Command(NAME, INTRO, {"fleet": FLEET}), own), settings.load(others)


def environment(loaded: settings.Loaded, replicas: int, on_this_machine: bool) -> dict[str, str]:
    """Return the variables of a replica's server: without an access log, and with its share of this machine's cores."""
    variables = loaded.config.to_environment()
    if loaded.origin["access_log"] == "default":
        variables["EB_ACCESS_LOG"] = "off"
    if on_this_machine and not loaded.config.compute_threads:
        variables["EB_COMPUTE_THREADS"] = str(max(1, (os.cpu_count() or 1) // replicas))
    return variables


def main(argv: Sequence[str] | None = None) -> None:
    """Start the replicas and serve until SIGTERM or SIGINT; SIGHUP replaces the replicas one after the other."""
    try:
        fleet, loaded = parse(sys.argv[1:] if argv is None else argv)
    except (UsageError, ValueError) as error:
        note(f"error: {error}")
        raise SystemExit(2) from None
    try:
        from fleet import ray_serve
    except ImportError as error:
        if error.name not in ("ray", "aiohttp"):
            raise
        note(f"error: {NOT_INSTALLED}")
        raise SystemExit(2) from None
    config = loaded.config
    options: dict[str, Any] = {
        "autoscaler": fleet.autoscaler, "host": "" if fleet.address else "127.0.0.1",
        "request_seconds": config.request_timeout, "cpus": fleet.cpus, "gpus": fleet.gpus,
        "up_seconds": fleet.upscale_delay, "down_seconds": fleet.downscale_delay,
    }  # fmt: skip
    variables = environment(loaded, fleet.replicas.most, not fleet.address)

    def deploy() -> Any:
        return ray_serve.deploy(ray_serve.replicas(variables, fleet.replicas, **options))

    try:
        ray_serve.start(fleet.address, math.ceil(fleet.cpus * fleet.replicas.most))
        asyncio.run(_serve(ray_serve.RayFleet(deploy(), fleet.router), deploy, ray_serve.stop, config))
    finally:
        ray_serve.disconnect()


async def _serve(fleet: Any, deploy: Callable[[], Any], end: Callable[[], None], config: settings.Config) -> None:
    from fleet.ingress import Ingress, serve

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def redeploy() -> None:
        note("replacing the replicas one after the other")
        done = loop.run_in_executor(None, deploy)
        done.add_done_callback(lambda done: note(f"replaced the replicas: {done.exception() or 'all are ready'}"))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, redeploy)
    note(f"serving at http://{config.host}:{config.port}/")
    try:
        await serve(Ingress(fleet), config.host, config.port, stop, config.request_timeout)
    finally:  # the handle's router needs this loop for its own end
        await loop.run_in_executor(None, end)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
