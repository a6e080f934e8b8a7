"""Where the code of a policy is: the hook that is being called, and the line that it has reached. Pure."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterable
from pathlib import PurePath
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

from scheduling.hooks import overrides
from scheduling.policy import Policy

HOOKS = [name for name, method in vars(Policy).items() if callable(method) and (name[0] != "_" or name == "__init__")]


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


def described(error: BaseException) -> str:
    """Return the type and the text of an error, whose own code may fail when it is asked for the text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _definition(policy: Policy, text: str) -> Place | None:
    """Return where the first hook of its own begins that a text names, None if it names none."""
    for hook in re.findall(r"[a-z_]+", text):
        if hook in HOOKS and overrides(policy, hook):
            code = getattr(inspect.unwrap(getattr(type(policy), hook)), "__code__", None)
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
        if any(getattr(vars(base).get(hook), "__code__", None) is frame.f_code for base in cls.__mro__):
            return hook
    return None


def _files_of(cls: type[Policy]) -> set[str]:
    """Return the files with the methods of a policy and its order, without that of the defaults."""
    methods = [method for base in cls.__mro__ if base not in (Policy, object) for method in vars(base).values()]
    return {method.__code__.co_filename for method in methods if hasattr(method, "__code__")}
