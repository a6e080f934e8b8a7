#!/usr/bin/env python3
"""Make the picture at the top of the README: runs of nobatch, static and dynamic, racing on the same arrivals.

It records them with dev/tools/record.py (or uses existing recordings), opens the race page of its own server in a headless
Chromium, and writes a PNG, and with --moving an animated picture. The recorded servers are real, but their model is a
mock whose steps take a fixed time, so that other programs on this machine do not change the picture. Needs playwright,
Pillow and Chromium.

usage: dev/tools/picture.py docs/race.png [--moving docs/race-moving.webp] [--record]
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dev.tools.record import arrivals, compact, record, server, write

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "web" / "demo"
POLICIES = ("nobatch", "static", "dynamic")
MODEL = "mock:affine"  # a step takes 8 ms, and 0.1 ms more for each row and each token
REQUESTS, GAP, TOKENS, SEED, SLOTS = 24, 0.025, (6, 90), 1, 4
FRAMES, FRAME_MS, REST_MS = 48, 130, 3000
STYLE = """
header, #race > .panel, #race > p { display: none } #race { padding: 12px } body { background: var(--panel) }
#lanes { margin-top: 0; gap: 8px } .lane { border: 0; box-shadow: none; padding: 4px 6px }
.lane .bar, .lane .figures { flex-wrap: nowrap; white-space: nowrap }
"""


def record_all() -> None:
    """Record the runs of the race page; the requests arrive at fixed times, in the same order at each server."""
    plan = [(k * GAP, body) for k, (_, body) in enumerate(arrivals(REQUESTS, 0, *TOKENS, SEED))]
    for policy in POLICIES:
        with server(policy, SLOTS, MODEL) as url:
            lines = compact(record(url, plan))
        write(DEMO / f"{policy}.jsonl", lines)
        print(f"{policy}: {len(lines)} lines", file=sys.stderr)


def shoot(still: Path, moving: Path | None, scheme: str) -> None:
    """Write the end of the race as a PNG, and its course as an animation."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("error: Chromium not found. Install it (Debian: apt install chromium)")
    with server("dynamic", SLOTS) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1160, "height": 760}, color_scheme=scheme, device_scale_factor=2)  # type: ignore[arg-type]
        page.goto(f"{url}/race")
        page.wait_for_timeout(1000)
        page.evaluate(
            "(css) => { const sheet = new CSSStyleSheet(); sheet.replaceSync(css); document.adoptedStyleSheets = [sheet]; }",
            STYLE,
        )
        end = page.evaluate("Math.max(...EB.race.lanes.map((lane) => lane.seconds))")

        def take(at: float) -> bytes:
            page.evaluate("(t) => { EB.race.clock = t; }", at)
            page.wait_for_timeout(80)
            return page.locator("#lanes").screenshot()

        still.parent.mkdir(parents=True, exist_ok=True)
        last = take(end)
        still.write_bytes(shrink(last))
        if moving is not None:
            animate(moving, [take(end * k / FRAMES) for k in range(1, FRAMES + 1)])
        browser.close()


def shrink(png: bytes) -> bytes:
    """Return the PNG with a palette, which suffices for flat colors."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(200).save(out, "PNG", optimize=True)
    return out.getvalue()


def animate(path: Path, frames: list[bytes]) -> None:
    """Write the frames at half their size, the last one shown longer."""
    from PIL import Image

    images: list[Any] = []
    for frame in frames:
        image = Image.open(io.BytesIO(frame)).convert("RGB")
        half = image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)
        images.append(half.quantize(128, dither=Image.Dither.NONE).convert("RGB"))
    durations = [FRAME_MS] * (len(images) - 1) + [REST_MS]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=durations, loop=0, lossless=True, quality=60, method=4
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("still", type=Path)
    parser.add_argument("--moving", type=Path, help="also write an animated picture (.webp, .png or .gif)")
    parser.add_argument("--record", action="store_true", help="record the runs again first")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    if args.record or not all((DEMO / f"{policy}.jsonl").is_file() for policy in POLICIES):
        record_all()
    shoot(args.still, args.moving, args.scheme)
    for path in filter(None, (args.still, args.moving)):
        print(f"{path}: {path.stat().st_size / 1024:,.0f} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
