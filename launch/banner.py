"""Messages on the terminal: warnings, errors, and the banner of a server that is ready."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from config import VERSION, Config
from terminal.option_types import address, is_local

if TYPE_CHECKING:
    from api.service import LoadedEngine

QUESTION = '"messages":[{"role":"user","content":"What is the capital of France?"}]}'


def warn(text: str) -> None:
    """Write a warning to stderr."""
    _write(_wrapped(f"warning: {text}"))


def note(text: str) -> None:
    """Write a progress note to stderr."""
    _write(text)


def fail(text: str) -> None:
    """Write a one-line error to stderr."""
    _write(_wrapped(f"error: {text}"))


def show(config: Config, engine: LoadedEngine, seconds: float) -> None:
    """Write the banner: policy, model, memory, address, and commands to try."""
    facts = engine.facts
    pages = engine.manager.pages
    fits = ""
    if pages is not None:
        counts = [*engine.sequences_that_fit.items()]
        (short, most), (whole, fewest) = counts[0], counts[-1]
        fits = f"room for {most:,} requests of {short:,} tokens, or {fewest:,} of {whole:,}"
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://{address(local, config.port)}"
    key = "required (Authorization: Bearer ...)" if config.api_key else "none"
    for text in facts.get("warnings", ()):
        _loud(text)
    rows = [
        ("policy", f"{engine.manager.policy_name}, {_slots(engine)}, queue of {engine.manager.max_queue:,}"),
        *_computing(engine, fits),
        *([("drafts", _drafts(config))] if engine.manager.speculator is not None else []),
        ("API key", key),
        *([("front ends", str(config.front_ends))] if config.front_ends else []),
        ("listening", f"{config.address}, ready in {seconds:.1f} s"),
        *([("demo", f"open {url}/ in a browser: a load without end, captions and a guided tour")] if config.demo else []),
        *([("lab", f"open {url}/lab/ in a browser, to write policies and race them")] if config.lab else []),
    ]  # fmt: skip
    lines = [f"effective-batching {VERSION}"] + [_wrapped(f"  {name:<10} {value}", 13) for name, value in rows]
    bearer = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    lines += ["try", *_request(engine, url, bearer), f"  curl {url}/stats{bearer}"]
    _write("\n".join(lines))
    if "*" in config.origins and not config.api_key:
        warn(
            "--cors-origins is *: any page in a browser that can reach this server may use it. "
            "Set --api-key, or list the origins"
        )
    if not is_local(config.host) and not config.api_key:
        warn(
            f"anyone who can reach {config.address} may use this server. "
            "Set --api-key, or use --host 127.0.0.1 to serve only this machine"
        )


def _drafts(config: Config) -> str:
    number = "as many as are worth their time" if config.drafts == "auto" else f"{config.drafts} for each request"
    return f"{config.draft_model or 'n-grams of the text'}, {number}"


def _slots(engine: LoadedEngine) -> str:
    used, slots = engine.manager.max_batch_size, engine.manager.slots
    return f"{slots} slots" if used == slots else f"{used} of {slots} slots"


def _request(engine: LoadedEngine, url: str, bearer: str) -> list[str]:
    """Return a command that sends a request: a chat if the model has a chat template.

    It is greedy, because small chat models often answer nonsense at temperature 1, the default.
    """
    if not engine.chats:
        return [f'  curl -X POST {url}/inference{bearer} -d \'{{"prompt":"ROMEO:","num_tokens":40}}\'']
    return [
        f"  curl {url}/v1/chat/completions{bearer} \\",
        "  -H 'Content-Type: application/json' -d '{\"temperature\":0,",
        f"  {QUESTION}'",
    ]


def _computing(engine: LoadedEngine, fits: str) -> list[tuple[str, str]]:
    """Return the rows on model, device and KV memory; `fits` describes the capacity of the KV pages."""
    facts = engine.facts
    if "instead" in facts:
        return [
            ("model", f"{engine.model_name}, context {engine.context:,}. There is no model: {facts['instead']}"),
            *([("KV pages", fits)] if fits else []),
        ]
    whole = facts.get("whole_context", engine.context)
    sampling = ", ".join(f"{name} {value:g}" for name, value in engine.sampling.items())
    cut = "" if whole == engine.context else f" of {whole:,}"
    return [
        ("model", f"{engine.model_name}, {facts.get('parameters', 0) / 1e6:.1f} M parameters, "
                  f"context {engine.context:,}{cut}"),
        *([("sampling", f"{sampling}, where a completion or chat names no other (the model's own)")] if sampling else []),
        ("device", f"{engine.device}, {_formats(engine)}, {facts.get('compute_threads', 0)} threads"),
        *([("kernels", kernels(facts))] if facts.get("kernels") else []),
        ("KV memory", ", ".join(filter(None, [f"{facts.get('kv_bytes', 0) / 2**20:,.0f} MiB", engine.kv_dtype, fits]))),
    ]  # fmt: skip


def kernels(facts: Mapping[str, Any]) -> str:
    """Return the implementation of each part of a GPU's engine, and why one is slower than it could be."""
    parts = ", ".join(f"{part} {name}" for part, name in facts["kernels"].items())
    return "; ".join([parts, *(f"SLOWER: {reason}" for reason in facts.get("fallbacks", ()))])


def _formats(engine: LoadedEngine) -> str:
    if engine.quantize == "as-stored":
        return f"{engine.dtype} with weights as in the file"
    return engine.dtype if engine.quantize == "none" else f"{engine.dtype} with {engine.quantize} weights"


def _loud(text: str) -> None:
    bar = "!" * 78
    _write(f"{bar}\nwarning: {text}\n{bar}")


def _wrapped(text: str, indent: int = 0) -> str:
    """Return a line, broken between words where it is longer than the terminal is wide."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk behind stderr is no reason not to serve
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
