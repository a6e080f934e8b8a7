"""The conversations of a ShareGPT file, of which client and server read the first question and its answer.

It must not know how they are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def read(path: Path) -> tuple[list[tuple[str, str]], list[tuple[int, str]]]:
    """Return the first (question, answer) of each conversation, and the entries without one: (number, why).

    ValueError for a file that cannot be read, or without any.
    """
    try:
        entries = json.loads(path.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{str(path)!r}, line {error.lineno}: invalid JSON: {error.msg}. Use a ShareGPT file, a JSON list of conversations"
        ) from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not a JSON list in UTF-8"
        raise ValueError(f"cannot read {str(path)!r}: {reason}. Use another ShareGPT file") from error
    if not isinstance(entries, list):
        raise ValueError(
            f"{str(path)!r} holds a JSON {type(entries).__name__}. Use a ShareGPT file, a list of conversations"
        )
    turns: list[tuple[str, str]] = []
    bad: list[tuple[int, str]] = []
    for number, entry in enumerate(entries, 1):
        try:
            turns.append(_first_turn(entry))
        except ValueError as error:
            bad.append((number, str(error)))
    if not turns:
        what = f"entry {bad[0][0]}: {bad[0][1]}" if bad else "the list is empty"
        raise ValueError(
            f"{str(path)!r} has no conversation: {what}. Use a list of objects with conversations (from, value) or "
            "messages (role, content)"
        )
    return turns, bad


def _first_turn(entry: Any) -> tuple[str, str]:
    """Return the first question that has an answer, and this answer."""
    said = entry.get("conversations") or entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(said, list):
        raise ValueError("has no list of conversations or messages")
    question = ""
    for message in said:
        if not isinstance(message, dict):
            raise ValueError("a message is not an object")
        speaker = SPEAKERS.get(str(message.get("from", message.get("role"))))
        text = message.get("value", message.get("content"))
        text = text.strip() if isinstance(text, str) else ""
        if speaker == "user":
            question = text
        elif speaker == "assistant" and question and text:
            return question, text
    raise ValueError("has no question with an answer")
