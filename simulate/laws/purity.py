"""The law that is read from a policy's source: it uses no clock and no randomness, so that a run can be repeated.

It must not know cases; what a policy does when it runs is held against the other laws in `laws.py`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from scheduling.policy import Policy
from simulate.laws.laws import Broken

FORBIDDEN = {
    "asyncio", "builtins", "concurrent", "ctypes", "datetime", "flask", "gc", "http", "importlib", "inspect", "io", "js",
    "logging", "multiprocessing", "os", "pathlib", "pyodide", "pyodide_js", "queue", "random", "secrets", "shutil",
    "signal", "simulate", "socket", "subprocess", "sys", "tempfile", "threading", "time", "torch", "urllib", "uuid",
}  # fmt: skip
FORBIDDEN_CALLS = {"__import__", "eval", "exec", "hash", "id", "input", "open"}


def check_purity(policy: Policy) -> None:
    """Broken when the source of a policy reads a clock, chance, or what differs from run to run."""
    for module in _modules_of(policy):
        check_source(Path(str(module.__file__)))


def check_source(path: Path) -> None:
    """Broken when a file is no Python, or reads what differs from run to run; the file is not imported."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    except SyntaxError as error:
        raise Broken("syntax", f"{path.name}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # bytes that are no text
        raise Broken("syntax", f"{path.name}: {error}") from error
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for node in nodes:
        for name in _asked(node, FORBIDDEN_CALLS - own):
            raise Broken(
                "purity",
                f"{path.name}, line {getattr(node, 'lineno', 0)}: {name} is not allowed. A policy may use only its "
                "arguments: no clock, no random generator, no files or processes, nothing that differs between runs",
            )


def _modules_of(policy: Policy) -> Iterator[ModuleType]:
    seen = set()
    for cls in type(policy).__mro__:
        module = inspect.getmodule(cls)
        if module is not None and module not in seen and not module.__name__.startswith("scheduling"):
            seen.add(module)
            if getattr(module, "__file__", None):
                yield module


def _asked(node: ast.AST, calls: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in FORBIDDEN)
    elif isinstance(node, ast.ImportFrom):
        if not node.level and str(node.module).partition(".")[0] in FORBIDDEN:
            yield f"import from {node.module}"
    elif isinstance(node, ast.Call):
        handed = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        called = [part.id for part in handed if isinstance(part, ast.Name)]
        yield from (f"{name}()" for name in called if name in calls)
