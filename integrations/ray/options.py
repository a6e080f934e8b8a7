"""The command line of a fleet, and the part of it that each replica's server gets. It must not import Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import config as settings
from config import Config
from generate.cores import cores
from integrations.queue import menu
from integrations.queue.receiving import Limits
from routing import autoscalers
from routing.autoscalers import Bounds
from routing.routers import ROUTERS
from terminal.options import Choice, Command, Number, Option, Read, UsageError, read, split

NAME = "./eb fleet"
INTRO = """Serve a language model by several replicas on Ray Serve. The settings of ./server.sh
apply to each replica; host, port and the order of the policy are those of the queue before them. For example:

\b
  ./eb fleet dynamic --model smollm2 --replicas 2..8"""

AVERAGE_SECONDS = 10.0  # over which Ray averages what autoscalers see
# Read when Ray is imported, in every process: one event loop instead of two, few reports about itself, none to others.
RAY_SETTINGS = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def runtime() -> dict[str, Any]:
    """Return the environment of Ray's processes for a fleet: those settings, and where this project is on each machine."""
    own = {name: os.environ.get(name, value) for name, value in RAY_SETTINGS.items()}
    return {"env_vars": {**own, "PYTHONPATH": str(settings.ROOT)}}


def bounds(text: str) -> Bounds:
    """Read 4, or 2..8 for autoscaling."""
    least, dots, most = text.partition("..")
    try:
        found = Bounds(int(least), int(most if dots else least))
    except ValueError:
        found = Bounds(0, 0)
    if not 1 <= found.least <= found.most <= 1000:
        raise ValueError(
            f"{text!r} is neither a number of replicas from 1 to 1,000 nor a range with the smaller number first. Use 4, or "
            "2..8 for autoscaling"
        )
    return found


def autoscaler(text: str) -> str:
    """Check the name and target of an autoscaler."""
    autoscalers.make(text)
    return text


FLEET = [
    Option("--replicas", "replicas: N, or LEAST..MOST for autoscaling", Read(bounds, "N"), default="2"),
    Option("--router", f"how a replica is chosen among those with a free slot: {', '.join(ROUTERS)}", Choice(ROUTERS, "NAME"), default="prefix-aware"),
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
    sections = {name: options for name, options in settings.command().sections.items() if name != "commands"}
    return Command(NAME, INTRO, {"fleet": FLEET, **sections})


@dataclass(frozen=True)
class Plan:
    """What a command line asks for: `config` is of the queue and the replicas, `environment` of each replica's server."""

    replicas: Bounds
    router: str
    autoscaler: str
    upscale_delay: float
    downscale_delay: float
    address: str
    cpus: float
    gpus: float
    config: Config
    limits: Limits
    environment: dict[str, str]

    @property
    def is_local(self) -> bool:
        """Whether Ray runs on this machine alone."""
        return not self.address


def parse(argv: Sequence[str]) -> Plan:
    """Read the flags of the fleet, and the other words as settings of its servers; UsageError for what is wrong."""
    if {"-h", "--help"} & set(argv):
        read(build_command(), ["--help"])
    own, others = split(argv, FLEET)
    given = read(Command(NAME, INTRO, {"fleet": FLEET}), own)
    values: dict[str, Any] = {str(option.name): getattr(given, str(option.name)) for option in FLEET}
    loaded = settings.load(others)
    if loaded.task != "serve":
        raise UsageError(f"--{loaded.task} is about one server. Use ./server.sh --{loaded.task}")
    config, most = loaded.config, values["replicas"].most
    menu.Shared().get_policy(config.policy, config.max_batch_size, config.policy_options)
    limits = Limits(config.receive_timeout, config.send_timeout, config.connections * most)
    environment = _environment(loaded, most, is_local=not values["address"])
    return Plan(**values, config=config, limits=limits, environment=environment)


def _environment(loaded: settings.Loaded, replicas: int, is_local: bool) -> dict[str, str]:
    """Return the variables of a replica's server: the loop of the policy, no access log, a share of the cores."""
    (loop, others), _ = menu.divided(loaded.config.policy, loaded.config.policy_options)
    pairs = ",".join(f"{name}={value}" for name, value in others.items())
    variables = replace(loaded.config, policy=loop, policy_option=pairs).to_environment()
    variables["EB_ACCESS_LOG"] = "off"  # the queue writes it
    if not is_local:
        variables["EB_TRUSTED_HOSTS"] = ""  # the queue checks them, and asks replicas by their addresses
    if is_local and not loaded.config.compute_threads:
        variables["EB_COMPUTE_THREADS"] = str(max(1, cores() // replicas))
    return variables
