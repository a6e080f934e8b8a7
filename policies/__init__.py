"""Batching policies: one loop per file, or `loop+order` with an order from `policies/orders/`.

The name of a policy is that of its file, with a hyphen for each underscore. There is no registry to edit: a new file
here is a new policy, and a user's own policy is named by its file (`path/to/my_policy.py`) or module
(`my_package.my_policy`).
"""

import sys
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import ModuleType

from scheduling.eviction import Eviction
from scheduling.hook_checks import INIT, mistakes, watched
from scheduling.located import described, locate
from scheduling.options import Option, OptionError, nearest, options_of
from scheduling.policy import Policy

TAKEN = {"self", "max_batch_size"}  # arguments of every policy that are not options


class PolicyFileError(ValueError):
    """A file of a policy that is wrong: `words` say how, with the remedy, and `line` where, None if nowhere."""

    def __init__(self, name: str, line: int | None, words: str) -> None:
        self.line, self.words = line, words
        super().__init__(f"cannot load policy {name!r}: {f'line {line}: ' if line else ''}{words}")


def names() -> list[str]:
    """Return the names of all loops."""
    return _names_in(Path(__file__).parent)


def order_names() -> list[str]:
    """Return the names of all orders, for `loop+order`."""
    return _names_in(Path(__file__).parent / "orders")


def eviction_names(*, clairvoyant: bool = False) -> list[str]:
    """Return the names of all evictions; with `clairvoyant`, also of those that only a simulator can have."""
    known = _names_in(Path(__file__).parent / "eviction")
    return [name for name in known if clairvoyant or not get_eviction(name).clairvoyant]


def get_eviction(name: str) -> Eviction:
    """Return a new eviction of this name; ValueError if there is none."""
    _check(name, "eviction", _names_in(Path(__file__).parent / "eviction"), own=False)
    made: Eviction = _module(name, "policies.eviction").Eviction()
    return made


def check_name(name: str, *, own: bool = True, hidden: Collection[str] = ()) -> None:
    """Raise ValueError with the nearest match when there is no such policy.

    With `own=False`, only the policies of this package are known, and no user's file or module is imported. Errors do not
    offer the `hidden` orders.
    """
    loop, order = _split(name, own)
    loops, orders = names(), order_names()
    if "+" in loop and loop.partition("+")[0] in loops:
        raise ValueError(f"policy {name!r} has two orders. Use one, as in {loop}")
    if name.endswith("+"):
        raise ValueError(f"{name!r} has nothing after the +. Use {loop}, or an order as in {loop}+sjf")
    if not loop and order:
        raise ValueError(f"{name!r} has nothing before the +. Use a policy, as in dynamic{name}")
    if loop in orders and loop not in loops:
        policy = order if order in loops else "dynamic"
        raise ValueError(f"{loop!r} is an order, not a policy. Put it after one, as in {policy}+{loop}")
    if order in loops and order not in orders:
        raise ValueError(
            f"{order!r} is a policy, not an order. Use one policy, alone or with an order, as in {order}+sjf"
        )
    _check(loop, "policy", loops, own)
    if order:
        offered = [known for known in orders if known not in hidden or known == order]
        _check(order, "order", offered, own)


def absolute(name: str) -> str:
    """Return a name that means the same in any folder: a file is named by its absolute path."""
    loop, order = _split(name)
    whole = [str(Path(part).expanduser().absolute()) if _is_file(part) else part for part in (loop, order)]
    return "+".join(filter(None, whole))


def complete(name: str) -> str:
    """Return `dynamic+FILE` for the file of an order, and other names as they are."""
    if not _is_file(name):
        return name
    module = _module(name, "policies")
    is_order = hasattr(module, "Order") and getattr(module, "Policy", Policy) is Policy
    return f"dynamic+{name}" if is_order else name


def named(own: type[Policy]) -> str:
    """Return a name under which a class, such as one of a notebook, is a policy; an order is one with `dynamic`."""
    name = f"policies._own.{own.__name__}"
    of_loop = any(base.__module__.rpartition(".")[0] == __name__ for base in own.__mro__)
    kind = "Policy" if of_loop or own.admit is not Policy.admit else "Order"
    spec = spec_from_file_location(name, f"{own.__name__}.py")
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    setattr(module, kind, type(kind, (own,), {"__module__": name}))
    return name if kind == "Policy" else f"dynamic+{name}"


def get_policy(
    name: str,
    max_batch_size: int = 32,
    options: Mapping[str, object] | None = None,
    *,
    own: bool = True,
    **more: object,
) -> Policy:
    """Return the policy called `name`, `loop` or `loop+order`, with `options`, which may be text.

    Raise ValueError, with the remedy, for a wrong name, option or value.
    """
    return policy_maker(name, own=own)(max_batch_size, options, **more)


def policy_maker(name: str, *, own: bool = True) -> Callable[..., Policy]:
    """Return a function that makes policies called `name` from slots and options; a user's file is imported once."""
    check_name(name, own=own)
    loop, order = _split(name)
    policy_class = _class_of(loop, order)

    def make(max_batch_size: int = 32, options: Mapping[str, object] | None = None, **more: object) -> Policy:
        values = {**(options or {}), **more}
        for taken in TAKEN & values.keys():
            raise ValueError(
                f"policy {name} has no option {taken!r}. Leave it out; slots are set at the start, by --max-batch-size"
            )
        try:
            policy = policy_class(max_batch_size=max_batch_size, **values)
        except (Exception, SystemExit) as error:
            place = None if isinstance(error, OptionError) else locate(walk_tb(error.__traceback__))
            if place is None or Path(place.file).is_relative_to(Path(__file__).parent):
                raise
            remedy = f"Write {INIT}" if "max_batch_size" in str(error) else "Correct the file"
            raise PolicyFileError(place.file, place.line, f"__init__() raises {described(error)}. {remedy}") from error
        policy.slots = max(policy.max_batch_size, max_batch_size)
        if policy.order_name:
            policy.name += f"+{policy.order_name}"
        return policy

    return make


def summary(name: str) -> str:
    """Return the first line of a policy's documentation."""
    check_name(name)
    return _first_line(_module(_split(name)[0], "policies"))


def order_summary(name: str) -> str:
    """Return the first line of an order's documentation."""
    return _first_line(_module(name, "policies.orders"))


def form_of(name: str, *, is_order: bool = False) -> list[dict[str, object]]:
    """Return the options of a policy, or of an order alone, as a form shows them.

    `type` is integer, number, boolean, choice, list or text.
    """
    policy_class = _find(_module(name, "policies.orders"), "Order", name) if is_order else _class_of(*_split(name))
    return [_field_of(option, item) for option, item in options_of(policy_class).items()]


def is_closed(name: str) -> bool:
    """Return whether no request joins a running batch of this loop."""
    return _class_of(name, "").closed


def _field_of(name: str, item: Option) -> dict[str, object]:
    types = {bool: "boolean", int: "integer", float: "number", tuple: "list", str: "choice" if item.choices else "text"}
    limits = {"minimum": item.low, "maximum": item.high, "choices": item.choices}
    return {
        "name": name, "type": types[type(item.default)], "default": _text(item.default), "help": item.help,
        "bounds": item.bounds, **{key: value for key, value in limits.items() if value not in (None, ())},
    }  # fmt: skip


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().partition("\n")[0]


def _names_in(folder: Path) -> list[str]:
    return sorted(p.stem.replace("_", "-") for p in folder.glob("[!_]*.py"))


def _split(name: str, own: bool = True) -> tuple[str, str]:
    """Return loop and order; without `own`, the name is not looked up as a file."""
    loop, plus, order = name.rpartition("+")
    return (name, "") if not plus or (own and _is_file(name)) else (loop, order)


def _is_file(name: str) -> bool:
    return name.endswith(".py") and Path(name).expanduser().is_file()


def _is_module(name: str) -> bool:
    try:
        return "." in name and not name.startswith(".") and find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _check(name: str, kind: str, known: list[str], own: bool) -> None:
    if name in known or (own and (_is_file(name) or _is_module(name))):
        return
    if own and name.endswith(".py"):
        raise ValueError(f"unknown {kind} {name!r}: there is no such file. Check the path")
    raise ValueError(f"unknown {kind} {name!r}.{nearest(name, known)} Use one of: {', '.join(known)}")


def _module(name: str, package: str) -> ModuleType:
    """Load a file or module of the user's own, which may raise anything, or import a policy of this package."""
    if "." not in name:
        return import_module(f"{package}.{name.replace('-', '_')}")
    path = Path(name).expanduser().absolute()
    spec = spec_from_file_location(f"policies._own.{path.stem}", path) if _is_file(name) else find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    try:
        if not _is_file(name):
            return import_module(name)
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(spec.name, None)
        words, missing = f"{described(error)}. Correct the file", getattr(error, "name", None)
        if isinstance(error, ModuleNotFoundError) and path.with_name(f"{missing}.py").is_file():
            words = f"cannot import {missing}.py from its folder. Copy its code into this file, or add the folder to PYTHONPATH"
        raise PolicyFileError(name, _line_of(error, spec.origin), words) from error
    return module


def _line_of(error: BaseException, path: str | None) -> int | None:
    """Return the last line of a file that was reached before an error, None if there is none."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None


def _stem(name: str) -> str:
    return Path(name).stem if _is_file(name) else name.rpartition(".")[2]


def _class_of(loop: str, order: str) -> type[Policy]:
    """Return a class that inherits from the loop and, after it, from the order."""
    loop_class = _find(_module(loop, "policies"), "Policy", loop)
    if not order:
        return loop_class
    order_class = _find(_module(order, "policies.orders"), "Order", order)
    return type("Policy", (loop_class, order_class), {"__module__": loop_class.__module__, "order_name": _stem(order)})


@lru_cache  # a file is a new module each time that it is loaded
def _find(module: ModuleType, name: str, policy: str) -> type[Policy]:
    loaded = getattr(module, name, None)
    if not (isinstance(loaded, type) and issubclass(loaded, Policy) and loaded is not Policy):
        remedy = f"Use dynamic+{policy}" if hasattr(module, "Order") else f"Write `class {name}(policy.Policy)` in it"
        raise ValueError(f"{policy} has no class {name} that inherits from scheduling.policy.Policy. {remedy}")
    for line, words in mistakes(loaded, module):
        raise PolicyFileError(policy, line, words)
    return watched(loaded) if "." in policy else loaded


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
