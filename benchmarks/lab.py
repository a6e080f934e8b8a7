"""How soon the lab's page is ready, and how long a race of 2,000 requests takes in it.

    python -m benchmarks.lab [--folder build/lab] [--runs 5]

Serves the built lab as any static host does, opens it in headless Chromium with an empty cache each time, waits for Python,
and races one policy and then four. The first run of all also compiles WebAssembly for the machine's first time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from playwright.sync_api import sync_playwright

from config import LAB_FOLDER

POLICIES = ["dynamic", "static", "dynamic+sjf", "chunked"]
ASKED = {"kind": "race", "workload": "steady", "count": 2000, "rate": 4.0, "slots": 4, "seed": 0, "text": ""}
READY = """async () => {
  while (globalThis.EB?.lab?.engine.state !== "ready") await new Promise((resolve) => setTimeout(resolve, 10));
}"""
TIMED = """async (question) => {
  const began = performance.now();
  const answer = JSON.parse(await EB.lab.engine.ask(question));
  if (answer.error) throw new Error(answer.error.words);
  return [(performance.now() - began) / 1000, answer.lanes[0].latency.length];
}"""


class Host(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def measure(browser: Any, url: str) -> dict[str, float]:
    """Return the seconds until the page is ready, and those of a race of one policy and of four."""
    context = browser.new_context()
    page = context.new_page()
    began = time.perf_counter()
    page.goto(url)
    page.evaluate(READY)
    ready = time.perf_counter() - began
    seconds = {"ready_s": ready}
    for name, chosen in (("race_of_one_s", POLICIES[:1]), ("race_of_four_s", POLICIES)):
        seconds[name], answered = page.evaluate(TIMED, ASKED | {"policies": chosen})
        assert answered == ASKED["count"]
    context.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default=str(LAB_FOLDER))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Host, directory=args.folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        runs = [measure(browser, f"http://127.0.0.1:{server.server_port}/") for _ in range(args.runs)]
        browser.close()
    server.shutdown()
    medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    worst = {name: round(max(run[name] for run in runs), 2) for name in runs[0]}
    print(json.dumps({"requests": ASKED["count"], "runs": args.runs, "median": medians, "worst": worst}))


if __name__ == "__main__":
    main()
