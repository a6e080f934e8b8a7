"""The documentation is complete, and what it points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev.tools import tables
from tests.support import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "weights/bard/README.md",
]
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def links(page: Path) -> list[str]:
    found = LINK.findall(CODE.sub("", page.read_text("utf-8")))
    return [link for link in found if not re.match(r"https?://", link)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_a_page_of_the_documentation_can_be_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        targets = {(page.parent / link.partition("#")[0]).resolve() for page in new for link in links(page)}
        new = {target for target in targets if target.suffix == ".md"} - reached
    assert set(PAGES) <= reached


def test_every_file_that_a_page_names_exists() -> None:
    named = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|c|sh|md|conf|service|json))[`:]")
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    missing = [
        f"{page.name}: {path}"
        for page in PAGES
        for path in named.findall(page.read_text("utf-8"))
        if path.partition("/")[0] in ours and not (ROOT / path).exists()
    ]
    assert missing == []


def test_the_pages_beside_the_tutorial_and_the_results_are_few() -> None:
    assert len([*(ROOT / "docs").glob("*.md")]) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_runs_exists_or_once_did(page: Path) -> None:
    text = page.read_text("utf-8")
    for module in re.findall(r"python -m ((?:[a-z_]+\.)*[a-z_]+)", text):
        path = ROOT / module.replace(".", "/")
        ours = (ROOT / module.partition(".")[0]).is_dir() or module.startswith(
            "benchmarks."
        )  # as dev/benchmarks was called
        exists = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        was_once = module.startswith("benchmarks.") and "at commit d3876eb" in text
        assert exists or was_once or not ours, module


def test_the_readme_is_short_and_needs_two_commands() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if "python -m" in line or ".venv" in line] == []


def test_every_function_that_the_architecture_names_behind_a_file_is_in_that_file() -> None:
    hops = re.findall(r"`([\w/]+\.py)`\s`(\w+)`", read("docs/architecture.md"))
    assert len(hops) > 12
    sources = {path: (ROOT / path).read_text("utf-8") for path, _ in hops}
    assert [hop for hop in hops if not re.search(rf"\b(?:def|class) {hop[1]}\b", sources[hop[0]])] == []


def test_every_method_in_the_states_of_connections_and_requests_exists() -> None:
    named = set(re.findall(r"\b([A-Z]\w+)\.(\w+)", read("docs/architecture.md").partition("## HTTP")[2]))
    assert len(named) > 10
    folders = ("api", "launch", "serving", "scheduling")
    sources = [path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    sources.append(read("batching.py"))
    missing = {
        (owner, method)
        for owner, method in named
        if not any(f"class {owner}" in text and f"def {method}(" in text for text in sources)
    }
    assert missing == set()


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return tables.tables()


def test_the_tables_of_the_documentation_are_those_of_the_code(made: dict[str, str]) -> None:
    assert list(tables.stale(made)) == []


def test_a_stale_table_is_named_and_rewritten_and_one_that_is_nowhere_an_error(
    made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "api.md"
    page.parent.mkdir()
    page.write_text("before\n" + "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in made) + "after\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "tables", lambda: made)
    assert tables.main(["--check"]) == 1
    assert "docs/api.md" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert tables.main([]) == 0
    assert page.read_text().startswith("before\n<!-- table: ")
    assert "`GET /health`" in page.read_text()
    assert tables.main(["--check"]) == 0
    for text, name in (("<!-- table: routs -->\n<!-- end -->\n", "routs"), ("", "routes")):
        page.write_text(text)
        with pytest.raises(ValueError, match=name):
            tables.stale({"routes": ""})


def test_a_command_is_called_by_its_name_under_eb() -> None:
    module = re.compile(
        r"-m (?:simulate|client\.(?:batch|chat|compare|sweep|top)|integrations\.(?:queue|ray\.serve))(?![.\w])"
    )
    texts = [
        *PAGES,
        *(path for path in ROOT.glob("[!.]*/**/*.py") if path.relative_to(ROOT).parts[0] not in ("dev", "tests")),
    ]
    assert [str(path) for path in texts if module.search(path.read_text("utf-8"))] == []


def test_no_source_file_points_at_a_document_that_is_not_there() -> None:
    sources = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]
    named = {
        (path.name, document)
        for path in sources
        for document in re.findall(r"\b(?:[A-Z_]{3,}|docs/\w+)\.md\b", path.read_text("utf-8"))
    }
    assert len(sources) > 100
    known = {page.name for page in PAGES}
    assert {entry for entry in named if entry[1].rpartition("/")[2] not in known} == set()
