"""Show the slots, the queue and the figures of a running server in a terminal.

It reads the same records as the live page, from `/events`. Without a terminal it prints a line every 5 s.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from terminal import options
from terminal.console import FINE

from . import flags
from .display import guarded
from .report import waste
from .send import events
from .send.target import ServerUnreachable, Target
from .tiles import Tiles

COLORS = ("dodger_blue2", "orange1", "spring_green4", "pink3", "sky_blue1", "dark_orange3", "yellow4", "medium_purple")
MARKS = {"prefill": "█", "decode": "▄", "held": "╱", "idle": "‥"}  # readable without colors, too
MAX_STEPS = 1000
SILENCE = 30.0  # seconds without a byte, after which the server counts as gone: it sends comments more often
RETRY_SECONDS = 1.0
TIMES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


class Watched:
    """A server's state, its last steps, and the problem of the connection, if any."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        self.tiles = Tiles()
        self.problem = "no answer yet"
        self.offset = 0.0  # server's clock minus ours
        self.last_id: int | None = None

    def add(self, event: str, data: dict[str, Any]) -> None:
        """Process one event."""
        if event == "state":
            if self.state.get("run") not in (None, data["run"]):  # another process counts its steps from 1 again
                self.steps.clear()
                self.tiles = Tiles()
                self.last_id = None
            self.state = data
            self.offset = data["now"] - time.monotonic()
            for arrival in data.get("waiting", ()):
                self.tiles.arrival(arrival)
        elif event in ("", "step"):
            self.steps.append(data)
            self.last_id = data["n"]
            self.state["policy"] = data["policy"]
            self.tiles.add(data)
        elif event == "arrival":
            self.tiles.arrival(data)
        elif event == "departure":
            self.tiles.departure(data)
        elif event == "policy":
            self.state |= {"policy": data["policy"]}

    def figures(self, now: float) -> dict[str, Any]:
        """Return the figures of the last seconds before `now` on the server's clock."""
        last = self.steps[-1] if self.steps else None
        running = sum(m["id"] in self.tiles.requests for m in last["members"]) if last else 0
        pages = last["pages"] if last else {"used": 0, "total": self.state.get("pages_total", 0)}
        if not running:  # the last step was recorded before its pages were freed
            pages = {**pages, "used": 0}
        waiting = last["queue"] if last else 0
        return {"running": running, "waiting": waiting, "pages": pages, **self.tiles.figures(now)}


async def follow(watched: Watched, target: Target, stop: threading.Event) -> None:
    """Process events until `stop` is set; reconnect when the connection is lost, and set `stop` if there never was one."""
    while not stop.is_set():
        last = {} if watched.last_id is None else {"Last-Event-ID": str(watched.last_id)}
        try:
            async with events.watch(target, last, SILENCE, detail="1", last="600") as stream:
                async for event, data in stream:
                    watched.add(event, json.loads(data))
                    watched.problem = ""
                    if stop.is_set():
                        return
            problem = "the server closed the connection"
        except (aiohttp.ClientConnectionError, asyncio.TimeoutError):
            problem = str(target.unreachable())
        except (aiohttp.ClientError, events.NoEvents, ValueError, KeyError, TypeError) as error:
            problem = str(error)[:200]
        if not watched.state:
            watched.problem = problem
            stop.set()
            return
        watched.problem = f"{problem.partition('. ')[0]}; reconnecting ..."
        await asyncio.sleep(RETRY_SECONDS)


def slots_picture(watched: Watched, width: int, height: int) -> Text:
    """Return the slots over the last iterations, the newest on the right, as many as fit."""
    columns = list(watched.steps)[-max(10, width - 10) :]
    slots = int(watched.state.get("slots", 1))
    used = max((m["slot"] + 1 for s in columns for m in s["members"]), default=1)
    rows = min(slots, max(used, min(8, slots)), max(4, height))
    grid: list[list[tuple[str, str]]] = [[("·", "grey37")] * len(columns) for _ in range(rows)]
    for x, step in enumerate(columns):
        joined = set(step["joined"])
        for member in step["members"]:
            if member["slot"] < rows:
                mark = "▌" if member["id"] in joined else MARKS.get(member["phase"], "?")
                grid[member["slot"]][x] = (mark, COLORS[sum(member["id"].encode()) % len(COLORS)])
    text = Text(no_wrap=True)
    for slot, row in enumerate(grid):
        text.append(f"{slot:>4} ", "grey62")
        for mark, style in row:
            text.append(mark, style)
        text.append("\n")
    text.append("queue", "grey62")
    highest = max([4, *(s["queue"] for s in columns)])
    for step in columns:
        text.append(" ▁▂▃▄▅▆▇█"[round(8 * step["queue"] / highest)], "grey70")
    text.append(f" {columns[-1]['queue'] if columns else 0}")
    if rows < slots:
        text.append(f"\n     slots {rows} to {slots - 1} do not fit", "grey50")
    return text


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def screen(watched: Watched, url: str, width: int, height: int) -> Group:
    """Return the whole screen."""
    state = watched.state
    figures = watched.figures(time.monotonic() + watched.offset)
    device = state.get("device", "none")
    model = state.get("model", "") + (f" on {device}" if device != "none" else "")
    head = Text()
    head.append(f" {state.get('policy', '?')} ", "bold reverse")
    head.append(f" {model} · {url}", "grey70")
    if watched.problem:
        head.append(f"  {watched.problem}", "bold yellow")
    tiles = Table.grid(expand=True, padding=(0, 2))
    pages = figures["pages"]
    cells = [
        ("running", f"{figures['running']} of {state.get('slots', '?')}"),
        ("waiting", str(figures["waiting"])),
        ("tokens/s", f"{figures['tokens/s']:,.0f}"),
        ("step time", seconds(figures["step"])),
        ("KV pages", f"{pages['used']} of {pages['total']}"),
        ("accepted", "-" if figures["accepted"] is None else f"{figures['accepted']:.0%}"),
        *((name, seconds(figures[name])) for name in TIMES),
        ("batch fill", "-" if figures["fill"] is None else f"{figures['fill']:.0%}"),
        ("wasted rows", "-" if figures["wasted"] is None else f"{figures['wasted']:.0%}"),
    ]
    for row in (cells[:6], cells[6:]):
        tiles.add_row(*(Text.assemble((name + "\n", "grey62"), (value, "bold")) for name, value in row))
    picture = slots_picture(watched, width - 4, height - 14)
    return Group(
        head, tiles, Panel(picture, title="slots x iterations", border_style="grey37"),
        waste.bar(figures["waste"], width - 4),
        Text("█ prefill  ▄ decode  ╱ held  · idle  ▌ joins  color: request  Ctrl-C exits", "grey50"),
    )  # fmt: skip


COMMAND = options.Command(
    "./eb top", (__doc__ or "").partition("\n")[0],
    {"arguments": [flags.URL],
     "options": [flags.PORT, flags.API_KEY, options.Option("--seconds", "exit after S seconds; 0: never", options.Number(0, kind=float, name="S"), default=0.0)]},
)  # fmt: skip


@guarded
def main(_: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Show a server until Ctrl-C; return 3 if it was never reached."""
    args = flags.parse(COMMAND, argv, environ)
    watched, stop, console = Watched(), threading.Event(), Console()
    target = Target(flags.at_port(args.url, args.port), api_key=args.api_key)
    threading.Thread(target=lambda: asyncio.run(follow(watched, target, stop)), daemon=True).start()
    end = time.monotonic() + (args.seconds or 1e12)
    try:
        if console.is_terminal:
            _redraw(console, watched, target.url, end, stop)
        else:
            _lines(watched, end, stop)
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
    if not watched.state:
        raise ServerUnreachable(watched.problem)
    return FINE


def _redraw(console: Console, watched: Watched, url: str, end: float, stop: threading.Event) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while time.monotonic() < end and not stop.wait(0.15):
            live.update(screen(watched, url, console.width, console.height), refresh=True)


def _lines(watched: Watched, end: float, stop: threading.Event) -> None:
    while time.monotonic() < end and not stop.wait(min(5.0, max(0.0, end - time.monotonic()))):
        figures = watched.figures(time.monotonic() + watched.offset)
        print(
            watched.problem or f"{figures['running']} running, {figures['waiting']} waiting, "
            f"{figures['tokens/s']:,.0f} tokens/s, {figures['steps']} steps, "
            + ", ".join(f"{name} {seconds(figures[name])}" for name in TIMES), flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
