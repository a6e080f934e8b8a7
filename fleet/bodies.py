"""What a queue reads from a request (the dialect, the prompt's blocks) and what it adds (a seed).

Everything else of a body passes byte for byte, so that the servers find its faults and name them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fleet.routers import Asked

# The routes that generate text, each with the field that holds its prompt.
PROMPTS = {
    "/inference": "prompt", "/v1/completions": "prompt", "/v1/chat/completions": "messages",
    "/v1/messages": "messages", "/v1/responses": "input", "/v1/embeddings": "input",
    "/generate": "inputs", "/generate_stream": "inputs", "/": "inputs",
}  # fmt: skip
LARGEST = 1 << 20  # bytes of a body that the servers take
SPARE = 64  # bytes that a seed takes
BLOCK = 256  # characters of a prompt in one block
PARAMETERS = re.compile(rb'"parameters"\s*:\s*\{')


def dialect(method: str, path: str) -> str:
    """Return the dialect in which the errors of a request of this kind are."""
    if path.startswith("/v1/messages"):
        return "messages"
    if path.startswith("/api/") and not path.startswith("/api/v1/"):
        return "ollama"
    return "tgi" if method == "POST" and PROMPTS.get(path) == "inputs" else "openai"


def asked(path: str, fields: Mapping[str, Any], session: str) -> Asked:
    """Return what routers may know: the prompt's blocks, and the session of the header or else the field `user`."""
    name = PROMPTS.get(path) or next((name for name in ("messages", "prompt", "input") if name in fields), "")
    options = fields.get("parameters") if name == "inputs" else fields
    user = options.get("user") if isinstance(options, Mapping) else None
    return Asked(blocks(str(fields.get(name, ""))[:LARGEST]), session or (user if isinstance(user, str) else ""))


def blocks(prompt: str) -> list[int]:
    """Return a hash for each whole block of a prompt; each also covers all blocks before it."""
    hashes = [0]
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1], prompt[start : start + BLOCK])))
    return hashes[1:]


def seeded(path: str, body: bytes, fields: Mapping[str, Any], seed: int) -> bytes:
    """Return the body with this seed, so that a second attempt at another replica gives the same text.

    Unchanged are bodies that name a seed, embeddings, which draw nothing, and those to which one seed means something
    else: several prompts or TGI's `best_of`, of which each answer draws its own.
    """
    start = len(body) - len(body.lstrip())
    if (
        path not in PROMPTS
        or path == "/v1/embeddings"
        or not fields
        or body[start : start + 1] != b"{"
        or len(body) + SPARE > LARGEST
    ):
        return body
    if PROMPTS[path] != "inputs":
        prompt = fields.get(PROMPTS[path])
        several = path == "/v1/completions" and isinstance(prompt, list) and not all(type(t) is int for t in prompt)
        return body if "seed" in fields or several else _with(body, start + 1, b'"seed": %d' % seed, True)
    parameters = fields.get("parameters")
    if "parameters" not in fields:  # without any, TGI samples; with some, only if one of them says so
        return _with(body, start + 1, b'"parameters": {"do_sample": true, "seed": %d}' % seed, True)
    places = [match.end() for match in PARAMETERS.finditer(body)]
    if not isinstance(parameters, dict) or len(places) != 1 or "seed" in parameters or "best_of" in parameters:
        return body
    return _with(body, places[0], b'"seed": %d' % seed, bool(parameters))


def _with(body: bytes, at: int, member: bytes, others: bool) -> bytes:
    """Return the body with one more member of an object, as its first."""
    return body[:at] + member + (b", " if others else b"") + body[at:]
