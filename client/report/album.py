"""One picture of a comparison: its colors, axes, caption and files. What it shows is decided in `plots`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.scale import LogTransform
from matplotlib.ticker import LogLocator, NullFormatter

from .store import Results, slug
from .summary import seeds

# Okabe and Ito's colors, which people with color blindness can distinguish.
KNOWN = {"nobatch": "#D55E00", "static": "#0072B2", "dynamic": "#009E73"}
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000", "#9467A8", "#8C6D31", "#999999")
MARKERS = "osD^vPX*<>"
STYLES = ("-", "--", "-.", ":")
WIDTH, HEIGHT = 6.4, 3.9
TOP, BOTTOM = 0.07, 0.04  # the shares of the height for title and caption
LEGEND = 0.08  # the same of a legend of the whole picture, below its axes
DPI = 150
NARROW = 30


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn picture: the name of its files, its title, and how to read it or ""."""

    name: str
    title: str
    says: str


@dataclass(slots=True)
class Album:
    """Draws the pictures of one comparison into its folder."""

    results: Results
    pictures: list[Picture] = field(default_factory=list)

    def look(self, policy: str) -> dict[str, Any]:
        """Return a policy's color, marker and line style, the same in every picture."""
        unknown = [p for p in self.results.policies if p not in KNOWN]
        place = self.results.policies.index(policy)
        return {
            "color": KNOWN.get(policy) or OTHERS[unknown.index(policy) % len(OTHERS)],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": STYLES[place % len(STYLES)],
        }

    def line(self, policy: str) -> dict[str, Any]:
        """Return a policy's look for a line with too many points for markers."""
        return self.look(policy) | {"marker": None}

    @contextmanager
    def draw(
        self, name: str, title: str, says: str = "", *, load: str = "", count: int | None = None,
        unit: str = "requests", across: int = 1, down: int = 1, points: Sequence[list[Any]] = (),
    ) -> Iterator[list[Axes]]:  # fmt: skip
        """Yield axes to draw on; save the picture at the end, and its points as CSV if there are some.

        A picture of one load is named after it, and is of its completed requests unless `count` says of how many.
        """
        if load:
            name, title = f"{name}.{slug(load)}", f"{title}, {load}"
        number = f"{self.requests(load) if count is None else count:,} {unit}"
        # Without pyplot, whose backend belongs to the program or notebook that draws, and which keeps its figures.
        figure = Figure(figsize=(max(WIDTH, 3.2 * across), HEIGHT if down == 1 else 2.8 * down))
        FigureCanvasAgg(figure)  # whose renderer measures texts for the layout
        yield list(figure.subplots(down, across, squeeze=False, sharey=across > 1 and down == 1).flat)
        figure.text(0.5, 1 - TOP / 4 / down, title, fontsize=11, ha="center", va="top")
        figure.text(0.01, 0.005, self.caption(number), fontsize=6.5, color="#555555")
        legend = LEGEND if figure.legends else 0
        figure.tight_layout(rect=(0, (BOTTOM + legend) / down, 1, 1 - TOP / down))
        save(figure, self.results.folder / "plots", name, points)
        self.pictures.append(Picture(name, title, says))

    def caption(self, count: str) -> str:
        """Return the line below a picture: n, model, machine, seeds and date."""
        s = self.results.summary
        machine = s.get("machine", {})
        where = str(machine.get("processor", "?"))
        where += f", {machine['cpus']} CPUs" if "cpus" in machine else ""
        model = self.results.runs[0].get("model_id") or "?"
        return f"n = {count} · {model} · {where} · {seeds(self.results, self.results.runs)} · {s.get('date', '')[:10]}"

    def policies(self, load: str) -> list[str]:
        """Return the policies that completed requests under a load."""
        return [p for p in self.results.policies if self.results.lines(p, load)]

    def requests(self, load: str) -> int:
        """Return the number of completed requests of all policies under a load."""
        return sum(len(self.results.lines(p, load)) for p in self.results.policies)


def save(figure: Figure, folder: Path, name: str, rows: Sequence[list[Any]]) -> None:
    """Write PNG, SVG, and CSV if there are rows."""
    folder.mkdir(parents=True, exist_ok=True)
    save_svg(figure, folder / f"{name}.svg")
    figure.dpi = DPI
    FigureCanvasAgg(figure).print_png(folder / f"{name}.png")  # `savefig` would draw each file twice
    if rows:
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def save_svg(figure: Figure, path: Path) -> None:
    """Write an SVG, with the same bytes for the same data."""
    with rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def finish(axes: Axes, x: str, y: str, zero: bool = True) -> None:
    """Label the axes, with units, and add grid and legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            transform = axis.get_transform()
            is_decimal = isinstance(transform, LogTransform) and transform.base == 10
            if high < NARROW * low and is_decimal:  # otherwise there would be one label, or none
                axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 4 * low else (1, 1.2, 1.5, *range(2, 10))))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    if zero:
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
