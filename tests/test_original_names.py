"""The original's Python names, imported as docs/api.md says."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests.support import ROOT

PAGE = (ROOT / "docs/api.md").read_text("utf-8").partition("## For users of the original")[2]
CODE = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
IMPORTS = [
    (statement.module, name.name)
    for statement in ast.parse(CODE).body
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
]
NAMES = {
    "BatchingManager", "DynamicBatchingServerModel", "Inference", "MAX_BATCH_SIZE", "PromptData", "ServerModel",
    "ServerStats", "dynamic_batch_generate", "generate", "load_base_model_config", "static_batch_generate",
}  # fmt: skip


def test_the_page_says_where_each_of_the_names_is() -> None:
    assert {name for _, name in IMPORTS} == NAMES


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_a_name_is_where_the_page_says(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_the_manager_has_the_methods_that_the_page_names() -> None:
    methods = re.findall(r"`(\w+)`", PAGE.partition("`BatchingManager` has")[2].partition(".")[0])
    assert len(methods) == 4
    manager = importlib.import_module("batching").BatchingManager
    assert all(callable(getattr(manager, method)) for method in methods)
