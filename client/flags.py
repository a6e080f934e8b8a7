"""The client's flags, each declared once: name, type, bounds and help, and which exclude each other.

Flags of the load and of the target are shared with `compare` and `sweep`.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from urllib.parse import urlsplit

from terminal import options
from terminal.console import EXIT_CODES, writable
from terminal.option_types import address
from terminal.options import FOLDER, KEY, POSITIVE, Choice, Number, Option, Parameter, Read, UsageError, Values

from . import data
from .send import dialects
from .workloads import arrivals, catalog, corpus

ENV_FILE = Path(__file__).resolve().with_name(".env")
STDOUT = Path("-")
DEFAULT_NUMSAMPLES = 100
DEFAULT_RATE = 1.0
SLOS = ("ttft", "tpot", "e2el")
LOCAL = "http://localhost:8500"
ADDRESS = re.compile(r"\w+://.*|[\w.-]+:\d+")


def slo(text: str) -> tuple[str, float]:
    """Read a limit such as ttft:500."""
    name, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if name not in SLOS or not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a limit. Use ttft:MS, tpot:MS or e2el:MS, such as ttft:500")
    return name, value


def is_address(word: str) -> bool:
    """Return whether a word is the address of a server where it may also be a name or a file."""
    return bool(ADDRESS.fullmatch(word))


def base_url(text: str) -> str:
    """Return the URL of a server without a final `/v1`, which the routes have; UsageError for what is none.

    HOST:PORT stands for http://HOST:PORT, and HOST alone for its port 8500.
    """
    url = text.rstrip("/").removesuffix("/v1")
    try:
        if "://" not in url:
            parts = urlsplit(f"//[{url}]" if url.count(":") > 1 and url[0] != "[" else f"//{url}")
            url = f"http://{parts.netloc}{'' if parts.port else ':8500'}{parts.path}"
        parts = urlsplit(url)
        is_bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        is_bad |= not url.isprintable() or any(c in url for c in "@?# \\")
        if "[" in parts.netloc or "]" in parts.netloc:
            IPv6Address(parts.hostname or "")
    except ValueError:
        is_bad = True
    if is_bad:
        raise UsageError(
            f"{text!r} is not a server address. Use http://HOST:PORT, with an IPv6 address as in http://[::1]:8500, and "
            "--api-key for a key"
        )
    return url


def at_port(url: str, port: int | None) -> str:
    """Return the address of the server at the port that --port names, if it names one."""
    parts = urlsplit(url)
    return parts._replace(netloc=address(parts.hostname or "", port)).geturl() if port else url


GOODPUT = Option(
    "--goodput", "latency limits in ms for goodput, such as ttft:500 tpot:50 e2el:9000", Read(slo, "SLO"),
    several=True, default=[],
)  # fmt: skip
LOAD = Read(arrivals.parse, "LOAD")
AT = Read(base_url, "URL")


def sent(numsamples: str, context: str = "1024", warmup: int = 3) -> list[Parameter]:
    """Return the flags of the load, with a command's own defaults in their help."""
    return [
        Option("--workload", "name of the workload (see below)", Read(catalog.check, "NAME")),
        Option(
            "--text", "take prompts from this text file instead of the built-in plays",
            Read(lambda text: corpus.load(Path(text)) and None, "FILE"),
        ),
        Option("--numsamples", f"number of requests, or of programs (default {numsamples})", Number(1, 100_000)),
        Option(
            "--context", f"maximum tokens of prompt and answer together (default: {context})", Number(8),
        ),
        Option(
            "--temperature", "temperature of every request; 0: greedy (default: the server's, but 1 with --api openai)",
            Number(0, 2, kind=float, name="T"),
        ),
        Option("--seed", "seed of prompts, lengths and times (default: random, and printed)", Number(0, 2**63 - 1)),
        Option("--warmup", f"requests sent one by one before the run, not measured (default {warmup})", Number(0, 1000)),
        GOODPUT,
    ]  # fmt: skip


URL = options.Argument("url", "address of the server: a URL, HOST:PORT or HOST", AT, default=LOCAL, envvar="IP")
PORT = Option("--port", "port of a running server: that of URL, or one of this machine", Number(1, 65535))
API = Option("--api", "API of the server", Choice(dialects.APIS), default="inference")
API_KEY = Option("--api-key", "API key; client/.env may set the variable too", KEY, envvar="EB_API_KEY")
TIMEOUT = Option("--timeout", "cancel a request after S seconds without data", POSITIVE, metavar="S", default=600.0)

# Of the commands that start servers and compare them.
STARTED = [
    Option("--model", "model of the servers to start", metavar="NAME"),
    Option("--load-format", "dummy: random weights of the right shape (default: auto if --model is used)", Choice(["auto", "dummy"])),
    Option(
        "--server", "more flags for these servers, as one argument: --server='--max-batch-size 16'. Speculative decoding is off "
        "unless --speculate auto is among them",
        Read(shlex.split, "FLAGS"), default=[],
    ),
]  # fmt: skip
ASKED = [
    API,
    Option("--stream/--no-stream", "request streams; without them there is no TTFT, ITL or TPOT", None, default=True),
    API_KEY,
    TIMEOUT,
]
OUTPUT = [
    Option("--out", "folder for all results", FOLDER, default=Path("results")),
    Option("--name", "name of this comparison (default: the time and the policies)", metavar="NAME"),
    Option("--no-plots", "write no plots and no page", None),
]


def command(
    name: str, help: str, sections: Mapping[str, Sequence[Parameter]], examples: Sequence[str]
) -> options.Command:
    """Return a command line whose help ends with the loads (if it takes one), the workloads, the examples and the exit codes."""
    takes_load = any(option.name == "load" for options in sections.values() for option in options)
    loads = [(form, text) for form, text, *_ in arrivals.KINDS.values() if form[:5] != "trace"]
    shown = "\n".join(["\b", *(f"  {line}" for line in examples)])
    return options.Command(
        name, help, sections,
        {**({"loads": loads} if takes_load else {}), "workloads": catalog.describe(), "examples": shown, "exit codes": EXIT_CODES},
    )  # fmt: skip


def parse(command: options.Command, argv: Sequence[str], environ: Mapping[str, str]) -> Values:
    """Return the values of a command line, the environment and client/.env, with a seed if none was given."""
    values = options.read(command, argv, environ, ENV_FILE)
    if getattr(values, "seed", 0) is None:
        values.seed = secrets.randbits(32)
    return values


def check(flags: Values) -> None:
    """Reject flags that contradict each other, and files that cannot be written."""
    paces = [f"--{name}" for name in ("burst", "rate", "wait", "load") if flags.is_given(name)]
    if len(paces) > 1:
        raise UsageError(f"{' and '.join(paces)} exclude each other. Use only one of them")
    if flags.prompt == "":
        raise UsageError("--prompt is empty. Use at least one character")
    if (flags.prompt is None) != (flags.numtokens is None):
        raise UsageError(
            "--prompt and --numtokens go together. Use --prompt TEXT --numtokens 40, or --numtokens_range for a load run"
        )
    if flags.prompt is not None and (flags.burst or flags.rate or flags.load):
        raise UsageError(f"--prompt sends a single request. Remove {paces[0]}")
    if flags.workload and (flags.selection or flags.numtokens_range):
        raise UsageError(f"--workload {flags.workload} draws its own lengths. Remove --selection and --numtokens_range")
    if flags.numtokens_range and flags.selection not in (None, *data.RANGE_SELECTIONS):
        raise UsageError(
            f"--selection {flags.selection} draws its own lengths. Use it without "
            f"--numtokens_range, or use --selection {', '.join(data.RANGE_SELECTIONS)}"
        )
    check_limits(flags)
    for flag, path in (("--json", flags.json), ("--csv", flags.csv)):
        if path and path != STDOUT:
            writable(path, flag)


def check_limits(flags: Values) -> None:
    """Reject limits that can only be measured with streams."""
    wanted = [name for name, _ in flags.goodput if name in ("ttft", "tpot")]
    if wanted and not flags.stream:
        raise UsageError(f"--goodput {wanted[0]} can only be measured with streams. Remove --no-stream, or use e2el:MS")
