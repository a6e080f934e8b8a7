"""The form of the fault table: what a case is, and the bodies and checks that most of them share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import MB, Setting, Watched

from tests.support.servers import Answer

LOOPS = ("nobatch", "static", "dynamic")  # of the cases in which the loop matters
PLAIN = Setting()
Act = Callable[[Watched], None]


@dataclass(frozen=True)
class Case:
    """One row: its id in the list of cases, what happens, the act that checks it, or the tests that do elsewhere.

    Without `quick` it is no part of ./test.sh alone. `killed`, `tracebacks` and `growth` (of memory) say what the
    after-check must allow; of a case that `ends` its server nothing is left to check.
    """

    id: str
    what: str
    act: Act | None = None
    setting: Setting = PLAIN
    policies: tuple[str, ...] = ("dynamic",)
    quick: bool = True
    killed: bool = False
    ends: bool = False
    tracebacks: bool = False
    growth: int = 20 * MB
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.id} {self.what}"


class Raw(str):
    """JSON as it is to be written, though Python has no value for it."""


NAMES = {
    "/inference": {"tokens": "num_tokens"},
    "/v1/completions": {"tokens": "max_tokens"},
    "/generate": {"prompt": "inputs", "tokens": "max_new_tokens"},
}
NAMES["/generate_stream"] = NAMES["/generate"]


def written(fields: Mapping[str, Any]) -> str:
    """Return an object as JSON text, in which a Raw stands as it is."""
    pairs = (f"{json.dumps(k)}: {v if isinstance(v, Raw) else json.dumps(v)}" for k, v in fields.items())
    return "{" + ", ".join(pairs) + "}"


def body(path: str, prompt: Any = "the house", tokens: Any = 3, **fields: Any) -> bytes:
    """Return a request in the dialect of the path; a field that is ... is left out."""
    names = NAMES.get(path, {})
    fields = {"prompt": prompt, "tokens": tokens} | fields
    named = {names.get(name, name): value for name, value in fields.items() if value is not ...}
    if path.startswith("/generate"):
        inputs = {name: named.pop(name) for name in ("inputs",) if name in named}
        named = inputs | {"parameters": Raw(written(named))}
    return written(named).encode()


def text_of(path: str, answer: Answer) -> str:
    """Return what was generated."""
    assert answer.status == 200, answer.body
    if path == "/inference":
        return str(answer.json["completion"])
    return str(answer.json["generated_text"] if "generate" in path else answer.json["choices"][0]["text"])
