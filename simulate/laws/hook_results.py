"""Check the arguments and results of a policy's hooks: errors name the hook, the line and the remedy.

This module must not know laws of scheduling: that requests join once, or that slots are free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakSet

from scheduling.hooks import overrides
from scheduling.policy import Policy
from scheduling.sequence import WAIT_REASONS, Sequence
from simulate.laws.laws import Broken

LAW = "what a hook returns"
ARGUMENTS = "the arguments of a hook"
NAMES = "the name of a hook"


_checked: WeakSet[type[Policy]] = WeakSet()  # classes without such a mistake, which makes their next trials cheaper


def _are_requests(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(seq, Sequence) for seq in value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(number, int) for number in value)


# What each hook may return, and the same in words.
RETURNS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "expires_at": (lambda value: isinstance(value, int | float), "a time in seconds, math.inf for never"),
    "order": (
        lambda value: _are_requests(value) or (isinstance(value, Iterable) and not isinstance(value, Collection)),
        "the waiting requests, the first to join first",
    ),
    "admit": (lambda value: isinstance(value, int), "a whole number: how many requests may join now"),
    "blocked_by": (lambda value: value is None or value in WAIT_REASONS, f"None or one of {', '.join(WAIT_REASONS)}"),
    "reserve_tokens": (lambda value: isinstance(value, int), "a whole number of tokens"),
    "victim": (lambda value: isinstance(value, Sequence), "one of the running requests"),
    "preempt": (_are_requests, "a list of running requests, [] for none"),
    "allocate_tokens": (_are_numbers, "a list with a whole number of tokens for each running request"),
    "allocate_drafts": (_are_numbers, "a list with a whole number of draft tokens for each sequence"),
    "release": (_are_requests, "a list of the running requests that leave"),
    "keep_until": (lambda value: isinstance(value, int | float), "a time in seconds, at most `now` for no pins"),
    "deadline": (lambda value: value is None or isinstance(value, int | float), "None or a time in seconds"),
}


def watch(policy: Policy) -> None:
    """Raise Broken for a hook that is misspelled or takes wrong arguments; from now on, each hook checks its results."""
    if type(policy) not in _checked:
        _check(policy)
        _checked.add(type(policy))
    for hook in RETURNS:
        if overrides(policy, hook):
            setattr(policy, hook, _watched(policy, hook))


def _check(policy: Policy) -> None:
    """Raise Broken where a hook is misspelled or takes other arguments than are passed."""
    hooks = [name for name in vars(Policy) if not name.startswith("_") and callable(getattr(policy, name))]
    for name in dir(policy):
        if not name.startswith("_") and not hasattr(Policy, name) and callable(getattr(policy, name)):
            _check_spelling(policy, name, hooks)
    for hook in hooks:
        if overrides(policy, hook):
            _check_arguments(policy, hook)


def _check_spelling(policy: Policy, name: str, hooks: list[str]) -> None:
    for hook in get_close_matches(name, hooks, 1, 0.8):
        place = _place(getattr(policy, name))
        raise Broken(NAMES, f"nothing calls {name}(){place}. Rename it to {hook}(), or to _{name}() if it is your own")


def _check_arguments(policy: Policy, hook: str) -> None:
    call, names = getattr(policy, hook), [*signature(getattr(Policy, hook)).parameters]
    try:
        signature(call).bind(*names[1:])
    except TypeError as error:
        wanted = f"def {hook}({', '.join(names)})"
        raise Broken(ARGUMENTS, f"{hook}(){_place(call)} has the wrong arguments. Write `{wanted}`") from error


def _place(call: Callable[..., Any]) -> str:
    code = getattr(call, "__code__", None)
    return f" (line {code.co_firstlineno} of {Path(code.co_filename).name})" if code else ""


def _watched(policy: Policy, hook: str) -> Callable[..., Any]:
    call = getattr(policy, hook)
    is_allowed, wanted = RETURNS[hook]

    def fail(value: object) -> Broken:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"a {type(value).__name__}"
        return Broken(LAW, f"{hook}(){_place(call)} returned {shown}. Return {wanted}")

    def each(requests: Iterable[Any]) -> Iterator[Any]:
        for seq in requests:
            if not isinstance(seq, Sequence):
                raise fail(seq)
            yield seq

    def watched(*args: Any, **more: Any) -> Any:
        value = call(*args, **more)
        if not is_allowed(value):
            raise fail(value)
        return each(value) if hook == "order" and not isinstance(value, Collection) else value

    return watched
