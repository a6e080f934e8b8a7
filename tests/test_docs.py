"""The documentation is complete, and what it points at is there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import config
import policies
from app import connect, create_app
from config import Config
from terminal.options import Number
from tests.support import ROOT
from tests.support.fakes import fake_engine

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "weights/bard/README.md"]
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


def rows(name: str) -> dict[str, list[str]]:
    """Return the cells of each table row of a page, by the code that its first cell begins with."""
    lines = [line for line in read(name).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].split("`")[1]: row for row in cells}


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
    readers_own = "README.md: policies/four.py"
    assert [entry for entry in missing if entry != readers_own] == []


@pytest.mark.parametrize("item", fields(Config)[1:], ids=lambda item: config.flag(item.name))
def test_every_flag_is_documented_with_its_default_and_bounds(item: Field[Any]) -> None:
    default = item.default
    documented = rows("docs/settings.md")[config.flag(item.name)]
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)
    assert documented[1] == (f"`{shown}`" if shown else "unset")
    kind = item.metadata["type"]
    bounds = ", ".join(f"`{choice}`" for choice in kind.known)
    if isinstance(kind, Number):
        bounds = f"{kind.low} or more" if kind.high == math.inf else f"{kind.low} to {kind.high}"
    assert documented[2] == bounds


def test_no_flag_is_documented_that_does_not_exist() -> None:
    flags = {name for name in rows("docs/settings.md") if name.startswith("--")}
    assert flags == {config.flag(item.name) for item in fields(Config)[1:]}


def documented_routes() -> Iterator[tuple[str, str]]:
    """Yield method and path of each route in the first cells of the API's tables: `GET`, where no method is named."""
    for row in rows("docs/api.md").values():
        method = "GET"
        for words in re.findall(r"`([^`]+)`", row[0]):
            *methods, path = words.split(" ")
            method = methods[0] if methods else method
            if path.startswith("/"):
                yield method.lower(), path


def test_every_route_is_documented_and_no_other() -> None:
    service = create_app(Config(policy="dynamic")).extensions["service"]
    assert set(documented_routes()) == {(op.method, op.path) for op in service.operations}


def test_every_metric_is_documented_with_its_type_and_no_other() -> None:
    app = create_app(Config(policy="dynamic", tgi_metrics=True))
    service = app.extensions["service"]
    connect(service, fake_engine())
    text = app.test_client().get("/metrics").text
    service.engine.manager.stop()
    exported = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in text_string_to_metric_families(text)
    }
    table = {name: row[1] for name, row in rows("docs/api.md").items() if re.match(r"(vllm:|eb_|tgi_)", name)}
    assert table == exported


@pytest.mark.parametrize("name", [*policies.names(), *policies.order_names()])
def test_every_policy_and_order_is_documented_with_its_options(name: str) -> None:
    table = rows("docs/policies.md")
    text = " ".join(table[name])
    text += "".join(" ".join(table[other]) for other in re.findall(r"as `([\w-]+)`", text))
    if "(#predictions)" in text:
        text += " ".join(f"`{option}`" for option in table)
    is_order = name in policies.order_names()
    options = {item.option for item in policies.describe(f"nobatch+{name}" if is_order else name)}
    assert {option for option in options if f"`{option}`" not in text} == set()


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
