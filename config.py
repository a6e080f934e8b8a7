"""The settings of the server, each declared once: name, default, bounds and help.

Each setting is a flag, an `EB_*` variable and a line in `.env`, in this order of precedence: `--max-batch-size`,
`EB_MAX_BATCH_SIZE`. The policy is also the first argument of the command line and the original's `BATCHING`.
This module must not know what the settings do, and imports nothing of the project.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from dotenv import dotenv_values

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"
COMPLETE = "EB_INTERNAL_COMPLETE"  # set where the environment holds every setting
RESERVE = 32  # HTTP threads in addition to those of open requests
LOOPBACK = ("localhost", "127.0.0.1")  # no page of another site has these host names
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # a browser leaves them out of an origin
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ConfigError(ValueError):
    """An invalid setting. The message names the value, the bound and the remedy."""


def setting(
    default: Any,
    help: str,
    group: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    size: bool = False,
    secret: bool = False,
    origins: bool = False,
) -> Any:
    return field(
        default=default,
        metadata={
            "help": help, "group": group, "minimum": minimum, "maximum": maximum,
            "choices": tuple(choices), "size": size, "secret": secret, "origins": origins,
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings of one server."""

    policy: str = setting("nobatch", "batching policy; the variable BATCHING sets it too", "batching")
    policy_option: str = setting(
        "", "option of the policy as NAME=VALUE; separate several with commas or repeat the flag", "batching"
    )
    max_batch_size: int = setting(
        64, "slots: maximum number of requests computed together", "batching", minimum=1, maximum=4096
    )
    max_tokens_per_step: int = setting(
        0, "maximum tokens per step; longer prompts are split into chunks; 0: 256 on a CPU, 2048 on a GPU", "batching",
        minimum=0, maximum=1 << 20,
    )  # fmt: skip
    max_queue: int = setting(
        1024, "maximum number of queued requests, beyond those that run; further requests get 429", "batching",
        minimum=0, maximum=16384,
    )  # fmt: skip
    max_queue_tokens: int = setting(
        1 << 20, "maximum tokens of queued requests, prompts and answers; further requests get 429", "batching",
        minimum=1, maximum=1 << 40,
    )  # fmt: skip
    queue_timeout: float = setting(
        0.0, "maximum seconds in the queue, then 504; 0: no limit but --request-timeout",
        "batching", minimum=0, maximum=86400,
    )  # fmt: skip
    request_timeout: float = setting(
        600.0, "maximum seconds from arrival to answer, then 504", "batching", minimum=0.01, maximum=86400
    )
    shadow: str = setting(
        "", "another policy to simulate on the same requests at the lowest priority; /stats and the live "
        "page show the result", "batching",
    )  # fmt: skip
    shadow_cost: str = setting(
        "", "cost model file for --shadow, written by 'python -m simulate calibrate'; unset: fitted to this server's steps",
        "batching",
    )  # fmt: skip
    model: str = setting(
        "", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, bard, or a folder with a GPT-2 "
        "checkpoint; unset: gpt2-medium, or bard if that cannot be loaded; mock:llm-mock or "
        "mock:FILE.json: no weights, only the delays of a cost model (append @10 for a tenth of them)", "model",
    )  # fmt: skip
    load_format: str = setting(
        "auto", "dummy: random weights of the right shape, for benchmarks", "model", choices=("auto", "dummy")
    )
    device: str = setting("auto", "device to compute on", "model", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto", "number format of weights and KV cache", "model", choices=("auto", "float32", "bfloat16", "float16")
    )
    batch_invariant: bool = setting(
        False, "on a GPU: compute the same tokens for a request alone and in any batch, slightly slower; always so on a CPU",
        "model",
    )  # fmt: skip
    tokenizer_file: str = setting(
        "", "file with GPT-2's byte-pair ranks (*.tiktoken); unset: downloaded once and cached", "model"
    )
    kv_memory: int = setting(
        0, "memory for KV pages, such as 512M or 2G; 0: a share of the free memory", "model", minimum=0, size=True
    )
    end_of_text: str = setting(
        "special", "meaning of <|endoftext|> in a prompt: the special token, or plain text; always plain text on /inference", "model",
        choices=("special", "text"),
    )  # fmt: skip
    prefix_cache: bool = setting(True, "share KV pages between prompts with the same prefix", "model")
    compute_threads: int = setting(
        0, "number of compute threads on a CPU; 0: one per core", "model", minimum=0, maximum=1024
    )
    host: str = setting("0.0.0.0", "address to listen on", "server")
    port: int = setting(8500, "port to listen on", "server", minimum=1, maximum=65535)
    max_connections: int = setting(
        0, "maximum open sockets; 0: queue and batch size plus 544", "server", minimum=0, maximum=1 << 20
    )
    receive_timeout: float = setting(
        10.0, "maximum seconds to wait for the next byte of a request, then the connection is closed",
        "server", minimum=0.1, maximum=3600,
    )  # fmt: skip
    send_timeout: float = setting(
        30.0, "maximum seconds that a client may read no byte of its response, then the connection is closed",
        "server", minimum=0.1, maximum=3600,
    )  # fmt: skip
    trusted_hosts: str = setting(
        "", "allowed Host headers, separated by commas; .example.org includes its subdomains; unset: any", "server"
    )
    cors_origins: str = setting(
        "", "origins whose pages may use this server from a browser, separated by commas, such as "
        "https://chat.example.org; *: any; unset: none", "server", origins=True,
    )  # fmt: skip
    overload_status: str = setting("429", "HTTP status when the server is full", "server", choices=("429", "503"))
    access_log: bool = setting(
        True, "write a JSON line to stdout for each request: lengths and times, never prompts", "server"
    )
    dashboard_show_text: bool = setting(
        False, "show the beginnings of prompts on the live page, to all of its viewers", "server"
    )
    tgi_metrics: bool = setting(False, "also export TGI's metric names (tgi_*) on /metrics", "server")
    api_key: str = setting("", "key that clients must send as a bearer token", "server", secret=True)

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item, getattr(self, item.name))
        if self.max_connections and self.max_connections < self.threads:
            raise ConfigError(
                f"--max-connections is {self.max_connections:,}, but --max-queue {self.max_queue:,} and "
                f"--max-batch-size {self.max_batch_size:,} need {self.threads:,}: one for each request and "
                f"{RESERVE} for health and refusals. Set it to {self.threads:,} or more, or lower --max-queue"
            )

    @property
    def policy_options(self) -> dict[str, str]:
        """The policy's options; ConfigError for one that is not NAME=VALUE."""
        pairs = [pair.strip() for pair in self.policy_option.split(",") if pair.strip()]
        for pair in pairs:
            if "=" not in pair:
                raise ConfigError(f"--policy-option is {pair!r}. Use NAME=VALUE, as in w_q=2")
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def max_open_requests(self) -> int:
        """The limit on queued and running requests."""
        return self.max_queue + self.max_batch_size

    @property
    def threads(self) -> int:
        """HTTP threads: one per open request, and a reserve for health, stats and rejections."""
        return self.max_open_requests + RESERVE

    @property
    def connections(self) -> int:
        """The limit on open sockets: those with a thread, and idle keep-alive connections."""
        return self.max_connections or self.threads + 512

    @property
    def hosts(self) -> list[str] | None:
        """Names by which clients may call the server, this machine's own among them; None for any."""
        names = [name.strip() for name in self.trusted_hosts.split(",") if name.strip()]
        return [*names, *LOOPBACK] if names else None

    @property
    def origins(self) -> frozenset[str]:
        """Sites whose pages may use the server, as browsers write them in Origin; * is any."""
        return read_origins(self.cors_origins, "--cors-origins")

    @property
    def overload_code(self) -> int:
        return int(self.overload_status)

    @property
    def queue_limit(self) -> float:
        """Seconds a request may wait at most."""
        return min(self.queue_timeout or self.request_timeout, self.request_timeout)

    def to_environment(self) -> dict[str, str]:
        """Return the settings as `EB_*` variables, for the process that serves: `.env` is in them."""
        settings = {variable(f.name): _text(getattr(self, f.name)) for f in fields(self)}
        return settings | {COMPLETE: "1"}


def variable(name: str) -> str:
    return "EB_" + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def check(item: Field[Any], value: Any, name: str = "") -> None:
    """Raise ConfigError, with `name` for the setting, when `value` is out of bounds."""
    low, high, choices = (item.metadata[k] for k in ("minimum", "maximum", "choices"))
    name = name or flag(item.name)
    if choices and value not in choices:
        near = get_close_matches(str(value), choices, 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name} is {value!r}.{guess} Use one of: {', '.join(choices)}")
    if low is not None and not value >= low:
        raise ConfigError(f"{name} is {value}, but must be at least {low}. Raise it")
    if high is not None and not value <= high:
        raise ConfigError(f"{name} is {value}, but must be at most {high}. Lower it")
    if item.metadata["origins"]:
        read_origins(value, name)
    if item.metadata["secret"] and not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{name} has characters that are not allowed in an HTTP header. Use printable ASCII")


def read_origins(text: str, name: str) -> frozenset[str]:
    """Return the origins in a comma-separated list; ConfigError for one that no browser sends."""
    origins = set()
    for given in (part.strip() for part in text.split(",") if part.strip()):
        origin = given.lower()
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{name} has {given!r}, which is not an origin. Use scheme://host or scheme://host:port without a path, "
                "as in https://chat.example.org, or * for any"
            )
        origins.add(origin.removesuffix(DEFAULT_PORTS.get(origin.partition(":")[0], "")))
    return frozenset(origins)


def parse(item: Field[Any], text: str, name: str = "") -> Any:
    """Parse and check the text of a setting; ConfigError when it is invalid."""
    value = _parse(item, text, name or flag(item.name))
    check(item, value, name)
    return value


def _parse(item: Field[Any], text: str, name: str) -> Any:
    kind = type(item.default)
    try:
        if kind is bool:
            return {"1": True, "true": True, "on": True, "yes": True,
                    "0": False, "false": False, "off": False, "no": False}[text.lower()]  # fmt: skip
        if item.metadata["size"]:
            digits = text.upper().removesuffix("B").removesuffix("I")
            unit = digits[-1:] if digits[-1:] in UNITS else ""
            return int(float(digits.removesuffix(unit)) * UNITS[unit])
        return kind(text)
    except (KeyError, ValueError, OverflowError):
        wanted = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
        if item.metadata["size"]:
            wanted = "a size such as 512M"
        raise ConfigError(f"{name} is {text!r}. Use {wanted}") from None


@dataclass(frozen=True)
class Loaded:
    """A configuration, the source of each value, and warnings."""

    config: Config
    origin: dict[str, str]
    warnings: list[str]


def load(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    dotenv: Path | None = None,
    policies: Mapping[str, str] | None = None,
) -> Loaded:
    """Read flags, environment and `.env`; raise ConfigError or, for a bad flag, exit with 2.

    `policies` maps the name of each policy to a one-line description for `--help`.
    """
    environ = os.environ if environ is None else environ
    lines = {} if environ.get(COMPLETE) else _read_dotenv(dotenv or ROOT / ".env")
    values: dict[str, Any] = {}
    origin = {item.name: "default" for item in fields(Config)}
    for source, found in ((".env", lines), ("environment", environ)):
        for item in fields(Config):
            name = variable(item.name)
            if item.name == "policy" and not found.get(name):
                name = "BATCHING"
            if found.get(name):
                values[item.name], origin[item.name] = parse(item, found[name], name), source
    for name, value in vars(parser(policies).parse_args(list(argv))).items():
        if value is not None and name in origin:
            values[name], origin[name] = value, "flag"
    return Loaded(Config(**values), origin, _unknown_variables([*environ, *lines]))


def _read_dotenv(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        return {name: text for name, text in dotenv_values(path).items() if text is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path.name}: {error}. Use plain UTF-8 text") from None


def _unknown_variables(names: Sequence[str]) -> list[str]:
    known = [variable(f.name) for f in fields(Config)] + ["EB_CACHE_DIR", "EB_KERNELS", "EB_FAULTS"]
    warnings = []
    for name in sorted(set(names)):
        if name.startswith("EB_") and name not in known and not name.startswith("EB_INTERNAL_"):
            near = get_close_matches(name, known, 1)
            guess = f" Did you mean {near[0]}?" if near else ""
            warnings.append(f"the variable {name} is not a setting and is ignored.{guess}")
    return warnings


METAVARS = {bool: "on|off", int: "N", float: "SECONDS", str: "TEXT"}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse's help with 100 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)


class Joined(argparse.Action):
    """Join the values of a repeated flag with commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest flag for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        flags = [option for action in self._actions for option in action.option_strings]
        if message.startswith("unrecognized arguments: "):
            given = message.removeprefix("unrecognized arguments: ").split()
            wrong = next((word for word in given if word.startswith("-")), given[0])
            wrong = wrong.split("=")[0]  # the value may be a secret
            near = get_close_matches(wrong, flags, 1)
            guess = f" Did you mean {near[0]}?" if near else ""
            what = "flag" if wrong.startswith("-") else "argument"
            message = f"unknown {what} {wrong}.{guess} Use one of: {' '.join(sorted(flags))}"
        print(f"error: {message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2)


def parser(policies: Mapping[str, str] | None = None) -> Parser:
    """Return the parser of the server's command line, built from the settings and the policies."""
    lines = [f"  {name:<22}{text}" for name, text in (policies or {}).items()]
    known = "\n\npolicies:\n" + "\n".join(lines) if lines else ""
    result = Parser(
        prog="./server.sh",
        usage="./server.sh <policy> [flags]",
        description="Serve a GPT-2 model over HTTP with the batching policy of your choice." + known,
        epilog="Each setting can also be an EB_* environment variable or a line in .env. Flags override the\n"
        "environment, and the environment overrides .env. Example: ./server.sh dynamic --model bard --port 8501",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    policy = fields(Config)[0]
    result.add_argument("policy", nargs="?", help=_help(policy))
    result.add_argument("--version", action="version", version=f"effective-batching {VERSION}")
    result.add_argument(
        "--print-config", action="store_true", help="print every setting with its value and source, then exit"
    )
    result.add_argument(
        "--doctor",
        action="store_true",
        help="check that this machine has what the server needs, then exit (same as ./server.sh doctor)",
    )
    groups = {}
    for item in fields(Config)[1:]:
        name = item.metadata["group"]
        groups[name] = groups.get(name) or result.add_argument_group(name)
        kind = type(item.default)
        groups[name].add_argument(
            flag(item.name),
            dest=item.name,
            type=lambda text, item=item: _parse_flag(item, text),
            action=Joined if item.name == "policy_option" else "store",
            metavar="|".join(item.metadata["choices"]) or ("SIZE" if item.metadata["size"] else METAVARS[kind]),
            help=_help(item),
        )
    return result


def _parse_flag(item: Field[Any], text: str) -> Any:
    try:
        return parse(item, text)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None


def _help(item: Field[Any]) -> str:
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    bounds = "" if low is None else f", {low}.." + ("" if high is None else f"{high}")
    default = "none" if item.default == "" else _text(item.default)
    text = f"{item.metadata['help']} [{default}{bounds}; {variable(item.name)}]"
    return text.replace("%", "%%")


def describe(loaded: Loaded) -> str:
    """Return every setting with its value and origin, secrets hidden."""
    lines = []
    for item in fields(Config):
        value = getattr(loaded.config, item.name)
        shown = "(set)" if item.metadata["secret"] and value else _text(value) or "(unset)"
        lines.append(f"{flag(item.name):<24}{shown:<24}{loaded.origin[item.name]}")
    return "\n".join(lines)
