"""How a server spent its slots: six kinds that add up to 100 %, their colors and marks. Pure.

The colors are those of the live page (`web/style.css`), and none of them is a policy's.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

COLORS = {
    "useful": "#4d6070", "padding": "#c2892a", "held": "#b4557f", "idle": "#c9d1d9", "recomputed": "#6b4fa0",
    "rejected": "#2f7f86",
}  # fmt: skip
MARKS = {  # readable without colors, too
    "useful": "█", "padding": "▒", "held": "╱", "idle": "·", "recomputed": "▓", "rejected": "░"
}  # fmt: skip
# On a terminal, whose background is unknown, the neutral kinds have the terminal's own colors.
STYLES = COLORS | {"useful": "default", "idle": "bright_black"}
Spent = Mapping[str, float]


def fill(spent: Spent) -> float | None:
    """Return the share of the slots that had a row; None without steps."""
    total = sum(spent.values())
    return 1 - spent.get("idle", 0.0) / total if total else None


def wasted(spent: Spent) -> float | None:
    """Return the share of the rows that were computed without a new token; None without rows.

    The server counts the same since its start (`rows_in_vain` in /stats); this is for the time between two readings.
    """
    rows = sum(spent.values()) - spent.get("idle", 0.0)
    return 1 - spent.get("useful", 0.0) / rows if rows else None


def percentages(spent: Spent) -> dict[str, int]:
    """Return integers that add up to 100: the largest remainders are rounded up."""
    total = sum(spent.values())
    exact = {kind: 100 * spent.get(kind, 0.0) / total for kind in COLORS}
    whole = {kind: int(share) for kind, share in exact.items()}
    missing = 100 - sum(whole.values())
    for kind in sorted(exact, key=lambda kind: whole[kind] - exact[kind])[:missing]:
        whole[kind] += 1
    return whole


def bar(spent: Spent, width: int) -> Text:
    """Return a bar of the kinds, and a line with their percentages."""
    if not sum(spent.values()):
        return Text("no steps", "bright_black")
    text, shares = Text(), percentages(spent)
    ends, total = 0.0, sum(spent.values())
    for kind in COLORS:
        start, ends = round(ends), ends + width * spent.get(kind, 0.0) / total
        text.append(MARKS[kind] * (round(ends) - start), STYLES[kind])
    text.append("\n")
    for kind, share in shares.items():
        if share or kind == "useful":
            text.append(f"{MARKS[kind]} {share} % {kind}  ", STYLES[kind])
    return text
