"""Reads the JSON of a request, within limits on what is read."""

from __future__ import annotations

import json
import re
from typing import Any

from api.http.errors import ApiError
from api.schemas.body import check_structure

MOST_TEXT = 8 << 20  # bytes of a body beside its pictures: more than any model reads
OBJECT = re.compile(rb"\s*\{")
BLOCK = 1 << 12
BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"  # some escape each slash


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, without its pictures; {} for what is none, and ApiError if there is too much in it."""
    if not OBJECT.match(body):
        return {}
    text = without_pictures(body)
    if len(text) > MOST_TEXT:
        size = f"{len(text):,} bytes beside its pictures"
        raise ApiError(f"the body has {size} (limit {MOST_TEXT:,}). Send a shorter prompt", status=413)
    try:
        check_structure(text)  # before anything is built
        fields = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def without_pictures(body: bytes) -> bytes:
    """Return a body without the blocks that lie within base64, where nothing else can begin or end."""
    blocks = (body[start : start + BLOCK] for start in range(0, len(body), BLOCK))
    # A slash may follow a backslash, and no backslash may be lost that escapes what follows.
    return b"".join(block if block.translate(None, BASE64) or block.endswith(b"\\") else b"/" for block in blocks)
