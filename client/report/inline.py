"""A drawn picture as part of a page: SVG whose ink, paper and shares of the slots take the page's colors, light or dark.

The page defines the variables `--panel` and those of `waste.COLORS`. Pure.
"""

from __future__ import annotations

import html
import re

from . import waste

INK, PAPER = "#000000", "#ffffff"
# The page has the title as text, and one line for all pictures instead of the caption.
OUTSIDE = re.compile(r'<g id="(?:title|caption)">.*?</g>', re.DOTALL)
NOT_FOR_A_PAGE = (
    re.compile(r"^.*?(?=<svg )", re.DOTALL),
    re.compile(r"<metadata>.*?</metadata>", re.DOTALL),
    re.compile(r' xmlns(:\w+)?="[^"]*"'),
    re.compile(r'(?<=<g) id="[^"]*"'),  # the same in every picture; nothing refers to a group
    re.compile(r'(?<=<svg) width="[^"]*" height="[^"]*"'),
)
BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')


def svg(drawn: str, title: str, top: float, bottom: float) -> str:
    """Return a picture as an element of a page, without the shares of its height that title and caption take."""
    text = OUTSIDE.sub("", drawn)
    for pattern in NOT_FOR_A_PAGE:
        text = pattern.sub("", text)
    text = text.replace("xlink:href", "href")
    colors = {INK: "currentColor", PAPER: "var(--panel)"} | {c: f"var(--{kind})" for kind, c in waste.COLORS.items()}
    for color, variable in colors.items():
        text = text.replace(color, variable)

    def cropped(box: re.Match[str]) -> str:
        width, height = map(float, box.groups())
        return f'viewBox="0 {top * height:.1f} {width:g} {(1 - top - bottom) * height:.1f}"'

    label = html.escape(title)
    return BOX.sub(cropped, text, count=1).replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
