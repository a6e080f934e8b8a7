"""Reads what a router needs to know about a request from its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routing.routers import RoutingKey

PROMPTS = ("messages", "prompt", "input", "inputs")  # the fields with a prompt: each dialect has one of them
LARGEST = 1 << 20  # bytes of a body that the servers take
BLOCK = 256  # characters of a prompt in one block


def routing_key(fields: Mapping[str, Any], session: str) -> RoutingKey:
    """Return what routers may know: the prompt's blocks, and the session of the header or else the field `user`."""
    name = next((name for name in PROMPTS if name in fields), "")
    options = fields.get("parameters") if name == "inputs" else fields
    user = options.get("user") if isinstance(options, Mapping) else None
    return RoutingKey(blocks(str(fields.get(name, ""))[:LARGEST]), session or (user if isinstance(user, str) else ""))


def blocks(prompt: str) -> list[int]:
    """Return a hash for each whole block of a prompt; each also covers all blocks before it."""
    hashes = [0]
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1], prompt[start : start + BLOCK])))
    return hashes[1:]
