"""The checks of a class of the user's own: of its source, when its file is loaded, and of what its hooks return.

This module must not know files, or laws of scheduling: that requests join once, or that slots are free.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import wraps
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from scheduling.located import code_of
from scheduling.options import shown
from scheduling.policy import Policy, PolicyError
from scheduling.sequence import WAIT_REASONS, Sequence

PUBLIC = [name for name in vars(Policy) if not name.startswith("_")]
HOOKS = {name: getattr(Policy, name) for name in PUBLIC if callable(getattr(Policy, name)) and name != "renew"}
ARGUMENTS = {name: [*inspect.signature(hook).parameters] for name, hook in HOOKS.items()}
RETURNS = {
    name: hint for name, hook in HOOKS.items() if (hint := get_type_hints(hook)["return"]) not in (bool, type(None))
}
RESULT = r"\b(return\b *[^\s#]|yield\b|raise\b|while\b)"  # a hook with a loop or an error may never return
CLOSE = 0.8  # the least similarity of a name that is a misspelled one
INIT = (
    "`def __init__(self)` without super().__init__(), or `def __init__(self, max_batch_size, **options)` with "
    "super().__init__(max_batch_size, **options)"
)


def mistakes(cls: type[Policy], module: ModuleType) -> Iterator[tuple[int | None, str]]:
    """Yield the line and the remedy of each misspelled name, and of each hook that nothing can call or use.

    A public name that no base has, and that its module never reads, is misspelled if it is close to one of Policy's, or
    a method with the arguments of a hook. A string may be a name that is given to getattr.
    """
    file, bare = str(module.__file__), object.__new__(cls)
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    tree = ast.dump(ast.parse("".join(lines)))
    own = [base for base in cls.__mro__ if base.__module__ == module.__name__]
    others = [base for base in cls.__mro__ if base not in own]
    for name in (name for base in own for name in vars(base) if not name.startswith("_")):
        is_known = any(hasattr(base, name) for base in others) or re.search(
            rf"(attr|value)='{name}'|id='{name}'(?!, ctx=Store)", tree
        )
        if not is_known and (meant := _meant(name, value := getattr(cls, name))):
            kind = "()" * callable(value)
            words = f"nothing uses {name}{kind}. Rename it to {meant}, or to _{name}{kind} if it is your own"
            yield _line(value), words
    for hook, names in ARGUMENTS.items():
        if (call := getattr(cls, hook)) is HOOKS[hook]:
            continue
        if not _takes(getattr(bare, hook), *names[1:]):
            yield _line(call), f"{hook}() has the wrong arguments. Write `def {hook}({', '.join(names)})`"
        elif hook in RETURNS and not _is(None, RETURNS[hook]) and _has_none(RESULT, call, lines, file):
            yield _line(call), f"{hook}() returns nothing. {_remedy(hook)}"
    init = bare.__init__  # type: ignore[misc]
    passes_on = _takes(init, max_batch_size=1) and not _has_none(r"__init__\(.*__init__\(", init, lines, file)
    if not hasattr(init, "__wrapped__") and not passes_on:  # wrapped by Policy
        yield _line(init), f"__init__() must pass the slots and options on. Write {INIT}"


def _meant(name: str, value: object) -> str:
    """Return the names that a name is close to, or the hooks with the arguments of this method; "" if there are none."""
    near = get_close_matches(name, PUBLIC, 1, CLOSE)
    if not near and inspect.isfunction(value):
        near = [hook for hook, names in ARGUMENTS.items() if names == [*inspect.signature(value).parameters]]
    return " or ".join(each + "()" * (each in HOOKS) for each in near)


def _line(value: object) -> int | None:
    return code.co_firstlineno if (code := code_of(value)) else None


def _takes(call: Callable[..., Any], *values: object, **named: object) -> bool:
    try:
        return bool(inspect.signature(call).bind(*values, **named))
    except (TypeError, ValueError):
        return False


def _has_none(pattern: str, method: Callable[..., Any], lines: list[str], file: str) -> bool:
    """Return whether a method of this file is written without such words."""
    code = code_of(method)
    if code is None or code.co_filename != file or code.co_name == "<lambda>":
        return False
    return not re.search(pattern, "".join(inspect.getblock(lines[code.co_firstlineno - 1 :])), re.S)


def watched(cls: type[Policy]) -> type[Policy]:
    """Return the class with hooks that raise PolicyError when they return what they must not."""
    hooks = {hook: getattr(cls, hook) for hook in RETURNS if inspect.isfunction(inspect.getattr_static(cls, hook))}
    own = {hook: _watched(hook, call) for hook, call in hooks.items() if call is not HOOKS[hook]}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **own})


def _watched(hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def check(value: Any, hint: Any) -> Any:
        if not _is(value, hint):
            raise PolicyError(f"{hook}() returned {shown(value)}. {_remedy(hook)}")
        return value

    @wraps(call)
    def watching(self: Policy, *values: Any, **named: Any) -> Any:
        value = check(call(self, *values, **named), RETURNS[hook])
        return (check(seq, Sequence) for seq in value) if isinstance(value, Iterator) else value

    return watching


def _remedy(hook: str) -> str:
    """Return the first sentence of the hook's documentation, which begins with Return."""
    return re.split("[.;\n]", HOOKS[hook].__doc__ or "")[0]


def _is(value: object, hint: Any) -> bool:
    """Return whether a value is what a hook declares to return; the requests of an iterator are still to come."""
    kinds = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_is(value, kind) for kind in kinds)
    if kinds and isinstance(value, Collection):
        return not (isinstance(value, dict) and get_origin(hint) is list) and all(
            issubclass(each, kinds) for each in set(map(type, value))
        )
    if kinds:
        return get_origin(hint) is Iterable and isinstance(value, Iterable)
    return value in WAIT_REASONS if hint is str else isinstance(value, (int, float) if hint is float else hint)
