"""Where the code of a policy is: the hook that is being called, and the line that it has reached. Pure."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Iterable
from pathlib import PurePath
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

from scheduling.hooks import overrides
from scheduling.options import nearest
from scheduling.policy import Policy, PolicyError

HOOKS = [name for name, method in vars(Policy).items() if callable(method) and (name[0] != "_" or name == "__init__")]
LONGEST_WORDS = 300


class Place(NamedTuple):
    """A line of a policy, and the hook whose call reached it. As text: `order() of loop.py, line 5`."""

    hook: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.hook}() of {PurePath(self.file).name}, line {self.line}"


def locate(frames: Iterable[tuple[FrameType, int | None]]) -> Place | None:
    """Return the policy's hook that is being called, with the last line of the policy's files that it reached.

    `frames` is what `traceback.walk_tb` or `traceback.walk_stack` yields. Return None if no hook is being called. A
    line in a module that the policy only uses counts as the line that called it.
    """
    calls = list(frames)
    if len(calls) > 1 and calls[0][0].f_back is calls[1][0]:  # `walk_stack` begins with the innermost call
        calls.reverse()
    for i, (frame, _) in enumerate(calls):
        policy = _policy_of(frame)
        hook = None if policy is None else _hook_of(frame, type(policy))
        if policy is not None and hook is not None:
            files = _files_of(type(policy)) | {frame.f_code.co_filename}
            inside = [(call, line) for call, line in calls[i:] if call.f_code.co_filename in files]
            call, line = inside[-1]
            return Place(hook, call.f_code.co_filename, line or call.f_code.co_firstlineno)
    return None


def locate_error(error: BaseException, policy: Policy | None = None) -> Place | None:
    """Return the line of a policy that raised an error, or where the hook begins whose call or result the caller refused.

    That is known from an error that names the hook, as a PolicyError does, or from the line of the call. Without a
    `policy`, it is that of the innermost scheduler that was called.
    """
    calls = list(walk_tb(error.__traceback__))
    if policy is None:
        owners = [getattr(frame.f_locals.get("self"), "policy", None) for frame, _ in calls]
        policy = next((owner for owner in reversed(owners) if isinstance(owner, Policy)), None)
    if policy is None:
        return locate(calls)
    lines = [linecache.getline(frame.f_code.co_filename, line) for frame, line in reversed(calls)]
    return locate(calls) or next(filter(None, (_definition(policy, text) for text in (described(error), *lines))), None)


def failure(error: BaseException, policy: Policy | None = None) -> str:
    """Return in one line what went wrong in a policy, where, and what to write instead."""
    place = locate_error(error, policy)
    words = str(error) if isinstance(error, PolicyError) else described(error)
    return f"{place}: {words}" if place else words


def described(error: BaseException) -> str:
    """Return the type and the text of an error in one short line; its own code may fail when it is asked for the text."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else error
        words = " ".join(f"{type(error).__name__}: {text}{_remedy(error)}".split()).removesuffix(":")
    except Exception:
        return type(error).__name__
    return words if len(words) <= LONGEST_WORDS else words[: LONGEST_WORDS - 1] + "…"


def _remedy(error: BaseException) -> str:
    """Return what to write for a name that is unknown, as Python itself does only from 3.12 on; "" for other errors."""
    name, words = getattr(error, "name", None) or "", ""
    if isinstance(error, AttributeError) and name:
        words = nearest(name, dir(error.obj))
    elif isinstance(error, ModuleNotFoundError):
        known = {*sys.modules, *sys.stdlib_module_names}
        words = nearest(name, (each for each in known if each[0] != "_")) or f"Install {name}, or do without it"
    elif isinstance(error, NameError) and name in sys.stdlib_module_names:
        words = f"Write `import {name}` at the top of the file"
    elif isinstance(error, NameError) and name:
        *_, (frame, _) = walk_tb(error.__traceback__)
        words = nearest(name, {*frame.f_locals, *frame.f_globals, *frame.f_builtins}) or "Define or import it"
    return f" ({words.strip()})" if words else ""


def _definition(policy: Policy, text: str) -> Place | None:
    """Return where the first hook of its own begins that a text names, None if it names none."""
    for hook in re.findall(r"[a-z_]+", text):
        if hook in HOOKS and overrides(policy, hook):
            code = code_of(getattr(type(policy), hook))
            return Place(hook, code.co_filename, code.co_firstlineno) if code else None
    return None


def _policy_of(frame: FrameType) -> Policy | None:
    """Return the policy whose method this call is, by its first argument."""
    names = frame.f_code.co_varnames
    first = frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None
    return first if isinstance(first, Policy) else None


def _hook_of(frame: FrameType, cls: type[Policy]) -> str | None:
    """Return the name of the hook that is called here: of the function, or what a class calls it."""
    if frame.f_code.co_name in HOOKS:
        return frame.f_code.co_name
    for hook in HOOKS:
        if any(code_of(vars(base).get(hook)) is frame.f_code for base in cls.__mro__):
            return hook
    return None


def _files_of(cls: type[Policy]) -> set[str]:
    """Return the files with the methods of a policy and its order, without that of the defaults."""
    bases = [base for base in cls.__mro__ if base not in (Policy, object)]
    return {code.co_filename for base in bases for method in vars(base).values() if (code := code_of(method))}


def code_of(method: Any) -> CodeType | None:
    """Return the code of a method as it is written, without what a decorator or a check has put around it."""
    return getattr(inspect.unwrap(method), "__code__", None)
