"""The settings of the server, each declared once: name, default, bounds and help.

Each setting is a flag, an `EB_*` variable and a line in `.env`, in this order of precedence: `--max-batch-size`,
`EB_MAX_BATCH_SIZE`. The policy is also the first argument of the command line and the original's `BATCHING`.
This module must not know what the settings do. It imports nothing of the project but how options are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from terminal import options
from terminal.option_types import HOST, KEY, ORIGINS, address, nearest, pieces, read_origins, read_pairs, trusted_names
from terminal.options import TEXT, Argument, Choice, Command, Number, OnOff, Option, Parameter, Section, Size, Type
from terminal.options import UsageError as ConfigError
from terminal.shell import complete

__all__ = ["KEY", "Config", "ConfigError", "Loaded", "flag", "load", "nearest", "text_of", "variable"]

ROOT = Path(__file__).resolve().parent
LAB_FOLDER = ROOT / "build" / "lab"  # where dev/tools/build_lab.sh puts it
VERSION = "0.2.0"
GROUPS = {"policy_option": "batching", "model": "model", "host": "server"}  # the first setting of each
LISTS = ("policy_option", "adapter", "adapter_folder")  # settings of which a command line may have several
COMPLETE = "EB_INTERNAL_COMPLETE"  # set where the environment holds every setting
RESOLVED = "EB_INTERNAL_RESOLVED"  # the launcher finds the model, its worker loads it
DEVICE_ERROR = "EB_INTERNAL_DEVICE_ERROR"  # of the engine before, for which this one does without fast kernels
RESERVE = 32  # HTTP threads in addition to those of open requests
# What --demo sets, where flags, environment and .env do not: about 20 steps a second, as slow as a person can follow.
DEMO = {"policy": "dynamic", "max_batch_size": 8, "model": "mock:distserve-opt13b@0.4"}
LAB = {"policy": "dynamic", "model": "mock:distserve-opt13b"}  # what --lab sets there: a lab needs no weights
COMMON = ("model", "port", "host", "api_key", "max_batch_size", "policy_option", "device", "quantize", "kv_memory",
          "batch_folder", "print_config", "doctor")  # fmt: skip  # what --help shows first
SUBCOMMANDS = ("demo", "doctor")  # first words that are short for the flags of these names
INTRO = """Serve a language model over HTTP with the batching policy of your choice. For example:

\b
  ./server.sh demo
  ./server.sh smollm2
  ./server.sh dynamic --model bard --port 8501

Each setting can also be an EB_* environment variable or a line in .env. Flags override the environment, and the
environment overrides .env."""


def setting(default: Any, help: str, type: Type | None = None) -> Any:
    type = type or (OnOff() if isinstance(default, bool) else TEXT)
    return field(default=default, metadata={"help": help, "type": type})


def seconds(low: float, high: float = 86400) -> Number:
    return Number(low, high, float, name="SECONDS")


@dataclass(frozen=True)
class Config:
    """The settings of one server."""

    policy: str = setting("nobatch", "policy, or a model to serve with dynamic; BATCHING sets the policy, too")
    policy_option: str = setting("", "option of the policy as NAME=VALUE; several: with commas, or repeat the flag")
    max_batch_size: int = setting(64, "slots: maximum number of requests computed together", Number(1, 4096))
    max_tokens_per_step: int = setting(
        0, "maximum tokens per step; longer prompts are split into chunks; 0: 256 on a CPU, 2048 on a GPU",
        Number(0, 1 << 20)
    )  # fmt: skip
    max_queue: int = setting(1024, "maximum queued requests, beyond those that run; more get 429", Number(0, 16384))
    max_queue_tokens: int = setting(
        1 << 20, "maximum tokens of queued requests, prompts and answers; further requests get 429", Number(1, 1 << 40)
    )
    queue_timeout: float = setting(0.0, "maximum seconds in the queue, then 504; 0: --request-timeout", seconds(0))
    request_timeout: float = setting(600.0, "maximum seconds from arrival to answer, then 504", seconds(0.01))
    dedup: str = setting(
        "off", "compute equal requests in flight once, and answer all of them; per-key: only those with the same API key",
        Choice(["off", "per-key", "all"])
    )  # fmt: skip
    model: str = setting(
        "", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, smollm2, bard; owner/name[@revision] or "
        "owner/name:file.gguf from the hub; a folder with a checkpoint, or a .gguf file; unset: "
        "gpt2-medium, or bard if that cannot be loaded; mock:llm-mock or mock:FILE.json: no weights, only the "
        "delays of a cost model (append @10 for a tenth of them)"
    )  # fmt: skip
    served_names: str = setting("", "further names of the model in requests, separated by commas; *: any name")
    adapter: str = setting("", "LoRA adapter, on CPUs: NAME=FOLDER or NAME=owner/name; repeat the flag for more")
    adapter_folder: str = setting("", "folder that /v1/load_lora_adapter may read; repeat the flag for more")
    adapter_memory: int = setting(1 << 30, "maximum memory of loaded adapters, such as 512M or 2G", Size())
    load_format: str = setting("auto", "dummy: random weights, for benchmarks", Choice(["auto", "dummy"]))
    device: str = setting("auto", "device to compute on", Choice(["auto", "cpu", "cuda"]))
    dtype: str = setting(
        "auto", "number format of weights and KV cache", Choice(["auto", "float32", "bfloat16", "float16"])
    )
    quantize: str = setting(
        "none", "format of the weights of linear layers, on CPUs; as-stored: the Q4_0, Q4_1 and Q8_0 blocks of a GGUF file; "
        "int8 or int4: rounded, half or a third of the memory of bfloat16, and faster",
        Choice(["none", "as-stored", "int8", "int4"])
    )  # fmt: skip
    kv_dtype: str = setting(
        "auto", "number format of keys and values; auto: that of the model; int8, on CPUs: about twice as many "
        "sequences in the same memory as with bfloat16", Choice(["auto", "int8"])
    )  # fmt: skip
    speculate: str = setting(
        "auto", "speculative decoding: compute several tokens of a request in a step where that is faster; no text changes. ngram: from "
        "repetitions in the text; model: by --draft-model; auto: by that if it is set, otherwise ngram on CPUs; off with padded policies",
        Choice(["off", "ngram", "model", "auto"])
    )  # fmt: skip
    draft_model: str = setting(
        "", "smaller model with the same tokenizer that proposes draft tokens, such as distilgpt2 for gpt2-medium"
    )
    drafts: str = setting(
        "auto", "with --speculate: draft tokens per request and step, 0 to 8; auto: as many as are worth their time",
        Choice(["auto", *map(str, range(9))], "N|auto")
    )  # fmt: skip
    mock_context: int = setting(0, "context of a mock model in tokens; 0: that of its cost model", Number(0, 1 << 20))
    mock_acceptance: float = setting(
        0.0, "with a mock model: probability that a draft token is accepted if those before it are; 0: it has none",
        Number(0, 1, float)
    )  # fmt: skip
    batch_invariant: bool = setting(
        False, "on a GPU: compute the same tokens for a request alone and in any batch, slightly slower; always so "
        "on a CPU"
    )  # fmt: skip
    tokenizer_file: str = setting("", "file with GPT-2's byte-pair ranks (*.tiktoken); unset: downloaded once")
    kv_memory: int = setting(0, "memory for KV pages, such as 512M or 2G; 0: a share of the free memory", Size())
    end_of_text: str = setting(
        "special", "meaning of <|endoftext|> in a prompt: the special token, or plain text; always plain text on "
        "/inference", Choice(["special", "text"])
    )  # fmt: skip
    prefix_cache: bool = setting(True, "share KV pages between prompts with the same prefix")
    evict: str = setting("lru", "which cached page to evict first", Choice(["lru", "ttl", "least-remaining-turns"]))
    pinned_prefixes: str = setting("", "ShareGPT file: cache only the most common beginnings of its first messages")
    pinned_pages: int = setting(256, "with --pinned-prefixes: number of cached pages", Number(0, 1 << 20))
    compute_threads: int = setting(0, "number of compute threads on a CPU; 0: one per core", Number(0, 1024))
    host: str = setting("0.0.0.0", "address to listen on", HOST)
    port: int = setting(8500, "port to listen on", Number(1, 65535))
    max_connections: int = setting(0, "maximum open sockets; 0: queue and batch size plus 544", Number(0, 1 << 20))
    front_ends: int = setting(
        0, "number of processes that read requests and write answers, beside the one that computes; 0: that one does both",
        Number(0, 64)
    )  # fmt: skip
    receive_timeout: float = setting(
        10.0, "maximum seconds to wait for the next byte of a request, then the connection is closed",
        seconds(0.1, 3600)
    )  # fmt: skip
    send_timeout: float = setting(
        30.0, "maximum seconds that a client may read no byte of its response, then the connection is closed",
        seconds(0.1, 3600)
    )  # fmt: skip
    trusted_hosts: str = setting(
        "",
        "allowed Host headers, separated by commas; .a.org includes its subdomains; unset: any, or local names on loopback",
    )
    cors_origins: str = setting(
        "", "origins whose pages may use this server from a browser, separated by commas, such as "
        "https://chat.example.org; *: any; unset: none", ORIGINS
    )  # fmt: skip
    batch_folder: str = setting(
        "", "folder for OpenAI's files and batches, which are computed while the server is idle; unset: no batches"
    )
    batch_width: int = setting(
        16, "maximum number of batch lines in a step; more are faster, but a request that arrives waits longer",
        Number(1, 4096)
    )  # fmt: skip
    batch_file_size: int = setting(200 << 20, "maximum bytes of an uploaded file, such as 500M", Size())
    batch_files: int = setting(1000, "maximum files in --batch-folder; further uploads get 429", Number(1, 1 << 20))
    batch_lines: int = setting(50_000, "maximum number of requests in a batch", Number(1, 1 << 30))
    batch_retention: float = setting(
        720.0, "hours for which files and ended batches are kept", Number(0.01, 87600, float, name="HOURS")
    )
    overload_status: str = setting("429", "HTTP status when the server is full", Choice(["429", "503"]))
    access_log: bool = setting(
        True, "write a JSON line to stdout for each request, lengths and times but never prompts; on a terminal a status "
        "line takes its place"
    )  # fmt: skip
    dashboard_show_text: bool = setting(False, "show the beginnings of prompts on the live page, to all of its viewers")
    demo: bool = setting(
        False, "demonstration: an endless load on eight slots at about 20 steps per second, without weights or downloads; "
        "same as ./server.sh demo", OnOff(alone=True)
    )  # fmt: skip
    lab: bool = setting(
        False, "also serve the lab at /lab/, a page for writing and racing policies, which dev/tools/build_lab.sh builds. "
        "Without --model it serves without weights", OnOff(alone=True)
    )  # fmt: skip
    api_key: str = setting("", "key that clients must send as a bearer token", KEY)

    def __post_init__(self) -> None:
        for item in fields(self):
            item.metadata["type"].read(getattr(self, item.name), flag(item.name))
        self.adapters  # noqa: B018  it raises
        if self.pinned_prefixes and (self.evict != "lru" or not self.prefix_cache):
            raise ConfigError("--pinned-prefixes never evicts. Leave out --evict and --prefix-cache, or it")
        if self.front_ends and self.dedup != "off":
            raise ConfigError("--front-ends compute each request. Leave out --dedup, or them")
        if self.max_connections and self.max_connections < self.threads:
            raise ConfigError(
                f"--max-connections is {self.max_connections:,}, but --max-queue {self.max_queue:,} and "
                f"--max-batch-size {self.max_batch_size:,} need {self.threads:,}: one for each request and "
                f"{RESERVE} for health and rejections. Set it to {self.threads:,} or more, or lower --max-queue"
            )

    @property
    def policy_options(self) -> dict[str, str]:
        """The policy's options."""
        return read_pairs([self.policy_option], "--policy-option")

    @property
    def adapters(self) -> dict[str, str]:
        return read_pairs([self.adapter], "--adapter", "NAME=FOLDER, as in comedies=weights/bard-comedies")

    @property
    def adapter_folders(self) -> list[Path]:
        """The folders from which adapters may be loaded while the server runs."""
        return [Path(folder).expanduser() for folder in pieces(self.adapter_folder)]

    @property
    def max_open_requests(self) -> int:
        """The limit on queued and running requests."""
        return self.max_queue + self.max_batch_size

    @property
    def threads(self) -> int:
        """HTTP threads: one per open request, and a reserve for health, stats and rejections."""
        return self.max_open_requests + RESERVE

    @property
    def address(self) -> str:
        """Where the server listens, as in a URL."""
        return address(self.host, self.port)

    @property
    def connections(self) -> int:
        """The limit on open sockets: those with a thread, and idle keep-alive connections."""
        return self.max_connections or self.threads + 512

    @property
    def hosts(self) -> list[str] | None:
        """Names by which clients may call the server, this machine's own among them; None for any."""
        return trusted_names(self.host, pieces(self.trusted_hosts))

    @property
    def origins(self) -> frozenset[str]:
        """Sites whose pages may use the server, as browsers write them in Origin; * is any."""
        return read_origins(self.cors_origins)

    @property
    def queue_limit(self) -> float:
        """Seconds a request may wait at most."""
        return min(self.queue_timeout or self.request_timeout, self.request_timeout)

    def to_environment(self) -> dict[str, str]:
        """Return the settings as `EB_*` variables, for the process that serves: `.env` is in them."""
        return {variable(f.name): text_of(getattr(self, f.name)) for f in fields(self)} | {COMPLETE: "1"}


def variable(name: str) -> str:
    return "EB_" + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def text_of(value: Any) -> str:
    """Return a value as a flag or a variable gives it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Loaded:
    """A configuration, the source of each value, and warnings."""

    config: Config
    origin: dict[str, str]
    warnings: list[str]
    task: str  # serve, doctor or print-config


def load(
    argv: Sequence[str] = (), environ: Mapping[str, str] | None = None, dotenv: Path | None = None,
    policies: Mapping[str, str] | None = None, orders: Sequence[str] = (),
) -> Loaded:  # fmt: skip
    """Read flags, environment and `.env`; ConfigError for what is wrong.

    `policies` maps the name of each policy to a one-line description for `--help`; `orders` are names.
    """
    environ = os.environ if environ is None else environ
    path = None if environ.get(COMPLETE) else dotenv or ROOT / ".env"
    parser = command(policies, orders)
    complete(parser, "_SERVER_SH_COMPLETE", environ)  # set by a shell that completes the command line
    words = [f"--{argv[0]}", *argv[1:]] if argv and argv[0] in SUBCOMMANDS else argv
    values = options.read(parser, words, environ, path)
    if values.version:
        print(f"effective-batching {VERSION}")  # noqa: T201
        raise SystemExit(0)
    vars(values).update({name: ",".join(getattr(values, name)) for name in LISTS})
    defaults = {**(LAB if values.lab else {}), **(DEMO if values.demo else {})}
    for name, value in defaults.items():
        if values.origin[name] == "default":
            setattr(values, name, value)
            values.origin[name] = "demo" if values.demo else "lab"
    return Loaded(
        Config(**{item.name: getattr(values, item.name) for item in fields(Config)}),
        values.origin,
        _unknown_variables([*environ, *options.read_dotenv(path)]),
        "print-config" if values.print_config else "doctor" if values.doctor else "serve",
    )


def _unknown_variables(names: Sequence[str]) -> list[str]:
    known = [variable(f.name) for f in fields(Config)] + ["EB_CACHE_DIR", "EB_KERNELS", "EB_PLUGIN", "EB_PYTHON"]
    return [
        f"the variable {name} is not a setting and is ignored.{nearest(name, known)}"
        for name in sorted(set(names))
        if name.startswith("EB_") and name not in known and not name.startswith("EB_INTERNAL_")
    ]


def command(policies: Mapping[str, str] | None = None, orders: Sequence[str] = ()) -> Command:
    """Return the command line of the server, made of the settings; --help lists the policies and orders."""
    policy, *others = fields(Config)
    group, known = "", [*(policies or ()), *SUBCOMMANDS]
    sections: dict[str, list[Parameter]] = {
        "arguments": [Argument(
            "policy", policy.metadata["help"], default=policy.default, required=False,
            envvar=[variable("policy"), "BATCHING"],
            shell_complete=lambda ctx, param, begun: [name for name in known if name.startswith(begun)],
        )],
        "commands": [
            Option("--version", "print the version and exit", None),
            Option("--print-config", "print every setting with its value and source, and exit", None),
            Option("--doctor", "check that this machine has what the server needs, and exit; same as ./server.sh doctor", None),
        ],
    }  # fmt: skip
    for item in others:
        group = GROUPS.get(item.name) or group
        option = Option(
            flag(item.name), item.metadata["help"], item.metadata["type"], envvar=variable(item.name),
            default=[] if item.name in LISTS else item.default, repeat=item.name in LISTS,
        )  # fmt: skip
        sections.setdefault(group, []).append(option)
    more: dict[str, Section] = {"policies": list(policies.items())} if policies else {}
    if orders:
        more["orders"] = f"POLICY+ORDER, as in dynamic+sjf, changes who is next in the queue: {', '.join(orders)}"
    return Command("./server.sh", INTRO, sections, more, COMMON)
