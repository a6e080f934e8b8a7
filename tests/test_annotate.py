"""docs/source.md is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import annotate

SOURCE = '''"""The file.

More of it.
"""

import math

# Why this is
# here.
LIMIT = math.inf  # not a line of its own


class Loop:
    def plan(self, now):
        """Return what is next."""
        if now > LIMIT:
            # Too late.
            return None
        return "# no comment"
'''


def test_the_page_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert annotate.main(["--check"]) == 0, capsys.readouterr().out


def test_docstrings_and_comments_become_text_above_the_code_that_follows_them() -> None:
    assert list(annotate.annotated(SOURCE, "Loop.plan")) == [
        "Return what is next.",
        "```python\ndef plan(self, now):\n    if now > LIMIT:\n```",
        "Too late.",
        '```python\n        return None\n    return "# no comment"\n```',
    ]
    whole = list(annotate.annotated(SOURCE))
    assert whole[:3] == ["The file.\n\nMore of it.", "```python\nimport math\n```", "Why this is\nhere."]
    assert whole[-5].endswith("class Loop:\n```")


def test_a_function_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no Loop\.stop"):
        list(annotate.annotated(SOURCE, "Loop.stop"))


def test_a_stale_page_is_named_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "loop.py").write_text(SOURCE)
    monkeypatch.setattr(annotate, "ROOT", tmp_path)
    monkeypatch.setattr(annotate, "SHOWN", {"loop.py": ("Loop.plan",)})
    assert annotate.main(["--check"]) == 1
    assert "docs/source.md is stale" in capsys.readouterr().out
    assert annotate.main([]) == 0
    assert "## [loop.py](../loop.py)\n\nThe file." in (tmp_path / "docs/source.md").read_text("utf-8")
    assert annotate.main(["--check"]) == 0
