"""The page and the picture of the board. This module must not know how a figure is computed again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from simulate.board.figures import Figure, Result

TEMPLATE = Path(__file__).with_name("page.txt")


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def published(figure: Figure) -> str:
    """Return the published factor, or its bounds."""
    return " to ".join(map(number, figure.published))


def ours(result: Result) -> str:
    """Return our factor with its interval."""
    return f"{number(result.mean)} ({number(result.low)} to {number(result.high)})"


def link(policy: str) -> str:
    """Return the name of a policy, linked to the files of its loop and of its order."""
    loop, _, order = policy.partition("+")
    files = {loop: f"../policies/{loop}.py", order: f"../policies/orders/{order}.py"}
    return "+".join(f"[`{name}`]({file.replace('-', '_')})" for name, file in files.items() if name)


def page(figures: Sequence[Figure], results: Mapping[str, Result], never: Sequence[str]) -> str:
    """Return the page; `never` are the policies that are never best."""
    rows = ["paper | figure | policy | published | ours | verdict", " | ".join(["---"] * 6)]
    parts: dict[str, str] = defaultdict(str)
    for figure in figures:
        result, load = results[figure.name], figure.load and f", and requests `{figure.load}`"
        cells = published(figure), ours(result), result.verdict
        rows.append(" | ".join([f"[{figure.paper}](#{figure.paper})", figure.says, link(figure.policy), *cells]))
        parts[figure.paper] += (
            f"* **{figure.says}**: published {cells[0]}, ours {cells[1]}: {cells[2]}. {figure.differs}\n\n"
            f"  `{figure.command} {figure.ours}` beside `{figure.beside}`, both with `{figure.options}`{load}\n"
        )
    verdicts = Counter(result.verdict for result in results.values()).most_common()
    parts["counts"] = f"{len(figures)} figures: {', '.join(f'{verdict} {count}' for verdict, count in verdicts)}"
    parts["table"] = "".join(f"| {row} |\n" for row in rows)
    parts["never"] = ", ".join(f"`{name}`" for name in never)
    return TEMPLATE.read_text("utf-8").format_map(parts)


def draw(figures: Sequence[Figure], results: Mapping[str, Result], path: Path) -> None:
    """Draw each published factor beside our interval, as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    from client.report.album import save_svg

    with matplotlib.rc_context({"font.size": 8}):
        drawing = Drawing(figsize=(8, 0.8 + 0.19 * len(figures)), layout="constrained")
        axes = drawing.subplots()
        axes.axvline(1, color="#999999", linewidth=0.8)
        for row, figure in enumerate(figures):
            mean, low, high, _ = results[figure.name]
            axes.plot(figure.published, [row] * len(figure.published), "D-", color="#D55E00", markersize=4)
            axes.plot([low, mean, high], [row] * 3, "o-", color="#0072B2", markersize=4, markevery=[1])
        axes.set_xscale("log")
        axes.set_yticks(range(len(figures)), [figure.name for figure in figures])
        axes.set_ylim(len(figures) - 0.5, -0.5)
        axes.set_xlabel("factor: published (orange), and ours with its 95 % interval (blue)")
        save_svg(drawing, path)
