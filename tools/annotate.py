"""Writes docs/source.md from the code: docstrings and full-line comments as text, each above the code that follows it.

The words are those of the code, so this module must not have any of its own about what the code does.

usage: python -m tools.annotate [--check]     --check: write nothing; exit with 1 if the page is stale
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/source.md"
# Files, and the functions of each that are shown; a file without any is shown whole.
SHOWN = {
    "scheduling/scheduler.py": (
        "Scheduler.step",
        "Scheduler.plan",
        "Scheduler.commit",
        "Scheduler.take_in",
        "Scheduler.settle",
    ),
    "policies/dynamic.py": (),
    "policies/static.py": (),
}
HEAD = """# The batching loop, read aloud

The code of the loop that all policies share, of continuous batching, and of static batching. Its docstrings and comments
are the text here: `python -m tools.annotate` writes this page. [Batching](batching.md) explains the ideas, and
[architecture](architecture.md) says where everything else is.
"""
Definition = ast.Module | ast.ClassDef | ast.FunctionDef


def definition(tree: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return what a file defines by a name such as `Scheduler.plan`; ValueError if it does not."""
    body, found = tree.body, None
    for part in name.split("."):
        inner = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not inner:
            raise ValueError(f"there is no {name}. Name one that is there in SHOWN of tools/annotate.py")
        found, body = inner[0], inner[0].body
    assert found is not None
    return found


def annotated(source: str, name: str = "") -> Iterator[str]:
    """Yield the text and the code of a function, or of a whole file, as paragraphs of Markdown."""
    tree = ast.parse(source)
    node: Definition = tree
    lines = source.splitlines()
    first, last, indent = 1, len(lines), 0
    if name:
        node = definition(tree, name)
        first, last, indent = node.lineno, node.end_lineno or node.lineno, node.col_offset
    docstrings: dict[int, str] = {}  # by the line above which they are shown
    skipped: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and (text := ast.get_docstring(inner)):
            docstrings[getattr(inner, "lineno", 1)] = text
            skipped.update(range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1))
    marked: list[tuple[bool, str]] = []  # whether it is text, and the line
    for number, line in enumerate(lines[first - 1 : last], first):
        if number in docstrings:
            marked.append((True, docstrings[number]))
        if number not in skipped:
            is_comment = line.lstrip().startswith("#")
            marked.append((is_comment, line.lstrip("# ") if is_comment else line[indent:]))
    for is_text, group in groupby(marked, key=lambda item: item[0]):
        text = "\n".join(line for _, line in group).strip("\n")
        if text:
            yield text if is_text else f"```python\n{text}\n```"


def page() -> str:
    """Return the page."""
    parts = [HEAD.strip()]
    for path, names in SHOWN.items():
        source = (ROOT / path).read_text("utf-8")
        parts.append(f"## [{path}](../{path})")
        if names:
            parts.append(ast.get_docstring(ast.parse(source)) or "")
        for name in names or [""]:
            parts += [f"### `{name}`\n\nIn [{path}](../{path})."] if name else []
            parts += annotated(source, name)
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str]) -> int:
    """Write the page, or with --check say whether it is stale; return the exit code."""
    text, file = page(), ROOT / PAGE
    if "--check" not in argv:
        file.write_text(text, encoding="utf-8")
    elif not file.exists() or file.read_text("utf-8") != text:
        print(f"{PAGE} is stale. Run python -m tools.annotate")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
