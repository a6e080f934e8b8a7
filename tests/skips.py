"""A pytest plugin: say at the end which tests were skipped and what they need; with --no-skips fail because of them.

Only a test that needs a machine of another kind may be skipped then: no program that could be installed would help.
"""

from __future__ import annotations

from collections import Counter

import pytest

OTHER_MACHINE = ("needs a GPU", "needs a processor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true",
        help="fail when a test is skipped, unless it needs a GPU or another processor",
    )  # fmt: skip


def reasons(config: pytest.Config) -> Counter[str]:
    """Return why tests were skipped, and how many for each reason."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)


def forbidden(config: pytest.Config) -> list[str]:
    """Return the reasons that --no-skips does not accept."""
    if not config.getoption("--no-skips"):
        return []
    return [reason for reason in reasons(config) if not reason.startswith(OTHER_MACHINE)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and forbidden(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = reasons(config)
    if not found:
        return
    terminalreporter.section("skipped")
    for reason, count in found.most_common():
        terminalreporter.line(f"{count} x {reason}")
    if refused := forbidden(config):
        terminalreporter.line(
            f"error: --no-skips allows no skip but for another machine, and {len(refused)} of these "
            "reasons say what is missing. Install it"
        )
