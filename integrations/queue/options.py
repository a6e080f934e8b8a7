"""The command line of a queue. It also takes the server settings that apply in front of an upstream."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import config as settings
from client import places
from client.send import ask
from config import Config
from integrations.queue.hints import CLIENT_BY
from integrations.queue.menu import LOOPS, ORDERS
from integrations.queue.server import Settings
from integrations.queue.sites import LOCAL, Site, Sites, read_site
from routing.routers import ROUTERS
from terminal.option_types import is_local
from terminal.options import Choice, Command, Number, Option, Read, Size, UsageError, read, split

NAME = "./eb queue"
INTRO = """Hold requests for servers that are not ours, and let them through in the order of a policy. For example:

\b
  ./eb queue dynamic+vtc --upstream http://127.0.0.1:11434 --slots 4
  ./eb queue dynamic+sjf --upstream http://127.0.0.1:8080"""
USUAL: dict[str, Any] = {"policy": "dynamic", "host": LOCAL[0], "port": 8600}  # where a server's setting is another
SERVES = ("policy", "policy_option", "max_queue", "max_queue_tokens", "queue_timeout", "request_timeout", "host", "port",
          "max_connections", "access_log", "receive_timeout", "send_timeout", "trusted_hosts", "cors_origins", "api_key")  # fmt: skip
ASK_SECONDS = 3.0
UNKNOWN_SLOTS = 16  # up to which `adaptive` may find the number of an upstream's slots

QUEUE = [
    Option("--upstream", "server to queue for: http://HOST:PORT, or http://HOST:PORT#SLOTS; repeat the flag for more",
           Read(read_site, "URL"), repeat=True),
    Option("--slots", "requests that each upstream may have at once; 0: one more than its slots, where it reports them (llama.cpp, SGLang, TGI, this server, vLLM in its development mode)", Number(0, 4096), default=0),
    Option("--router", f"how an upstream is chosen among those with a free slot: {', '.join(ROUTERS)}", Choice(ROUTERS, "NAME"),
           default="least-loaded"),
    Option("--upstream-key-env", "variable with the upstream's API key, which replaces the clients' own", default=""),
    Option("--idle-timeout", "maximum seconds for which an upstream may send nothing, then 504", Number(0.1, 86400, float, name="SECONDS"), default=300.0),
    Option("--context", "tokens of prompt and answer to expect if a client names no length", Number(1, 1 << 24), default=4096),
    Option("--client-by", "what tells clients apart: the header X-Queue-Client or the field user, else the key, else the address; "
           "key: the key, else the address; address: the address alone", Choice(CLIENT_BY), default="header"),
    Option("--client-tokens", "tokens per minute for each client, prompts and answers, then 429; 0: no limit", Number(0, 1e9, float),
           default=0.0),
    Option("--max-queue-bytes", "bytes that the bodies of waiting requests may take together, such as 512M; then 429", Size(), default=256 << 20),
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a command line asks for; `notes` are for the user."""

    config: Config
    sites: Sites
    settings: Settings
    notes: tuple[str, ...]


def build_command() -> Command:
    """Return the command line: the flags of the queue, and those of a server that apply to it."""
    sections = {name: [one for one in some if one.name in SERVES] for name, some in settings.command().sections.items()}
    for option in (one for some in sections.values() for one in some if one.name in USUAL):
        option.shown_default = USUAL[str(option.name)]
    sections["arguments"][0].help = "policy, as in dynamic+sjf, or a file with one"
    menu = {"policies": list(LOOPS.items()), "orders": list(ORDERS.items())}
    return Command(NAME, INTRO, {"queue": QUEUE, **{name: some for name, some in sections.items() if some}}, menu)


def parse(argv: Sequence[str]) -> Plan:
    """Read the command line, and ask upstreams for their slots; UsageError or ValueError for what is wrong."""
    if {"-h", "--help"} & set(argv):
        read(build_command(), ["--help"])
    own, others = split(argv, QUEUE)
    given = read(Command(NAME, INTRO, {"queue": QUEUE}), own)
    if not given.upstream:
        raise UsageError("no upstream is named. Use --upstream URL, as in --upstream http://127.0.0.1:11434")
    loaded = settings.load(others)
    if idle := next((name for name, how in loaded.origin.items() if how == "flag" and name not in SERVES), None):
        raise UsageError(
            f"--{idle.replace('_', '-')} has no effect in front of an upstream. Use the flags of ./eb queue --help"
        )
    known = {name: value for name, value in USUAL.items() if loaded.origin[name] == "default"}
    key = os.environ.get(given.upstream_key_env, "") if given.upstream_key_env else ""
    if given.upstream_key_env and not key:
        raise UsageError(
            f"the variable {given.upstream_key_env} of --upstream-key-env is empty. Set it to the upstream's key"
        )
    notes = asyncio.run(_find_slots(given.upstream, given.slots, key))
    sites = Sites(given.upstream, given.router)
    if notes and known.get("policy"):
        known["policy"] = "adaptive"
    config = dataclasses.replace(loaded.config, max_batch_size=sites.slots, **known)
    if not is_local(config.host) and not config.api_key:
        raise UsageError(
            f"--host {config.host} can be reached by others, and there is no key. Set EB_API_KEY, or use --host 127.0.0.1"
        )
    here = [f"{host}:{config.port}" for host in (config.host, *LOCAL)]
    if itself := next((site for site in sites.all if site.name in here), None):
        raise UsageError(
            f"--upstream {itself.url} is this queue itself. Name the server behind it, or use another --port"
        )
    limits = given.idle_timeout, given.context, given.client_by, given.client_tokens, given.max_queue_bytes
    return Plan(config, sites, Settings(key, *limits), (*notes, *(f"warning: {text}" for text in loaded.warnings)))


async def _find_slots(sites: list[Site], slots: int, key: str) -> list[str]:
    """Set the slots of the upstreams that name none; return what the user should know."""
    for number, site in enumerate(sites):
        if any(one.url == site.url for one in sites[:number]):
            raise UsageError(f"--upstream {site.url} is named twice. Use it once, with its slots: {site.url}#8")
        if any(site.name == other.name for other in sites[:number]):
            site.name = f"{site.name}-{number}"
    notes = []
    for site in sites:
        if not site.slots and not slots:
            found = await _ask_slots(site, key)
            # One more than slots keeps the upstream busy while the next request is on its way.
            site.slots = found + 1 if found > 0 else UNKNOWN_SLOTS
            if found <= 0:
                why = "does not report its slots" if found == 0 else "does not answer"
                notes.append(f"{site.name} {why}: up to {UNKNOWN_SLOTS} requests go to it at once. Set --slots")
        site.slots = site.slots or slots
    return notes


async def _ask_slots(site: Site, key: str) -> int:
    """Return the number of slots that an upstream tells, 0 if it tells none, -1 if it does not answer."""
    facts = await asyncio.to_thread(ask.facts, site.url, key, ASK_SECONDS)
    slots = places.number(facts.get("slots"))
    if not any(": HTTP " in how for how in facts["asked"]):
        return -1
    return int(slots) if slots >= 1 else 0
