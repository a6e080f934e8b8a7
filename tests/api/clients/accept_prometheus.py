#!/usr/bin/env python3
"""Acceptance of /metrics with prometheus_client's parser and, when PROMTOOL is set, `promtool check metrics`.

Names, values and OpenMetrics are tested in tests/api/test_metrics.py.

usage: accept_prometheus.py BASE_URL   env: PROMTOOL=/path/to/promtool (Debian package prometheus)
"""

import os
import subprocess

from _check import Checks, base_url, http
from prometheus_client.parser import text_string_to_metric_families as parse

BASE = base_url()
c = Checks(f"prometheus_client parser on {BASE}/metrics")


def flat(text):
    return {(s.name, *sorted(s.labels.items())): s.value for f in parse(text) for s in f.samples}


before = http("GET", BASE + "/metrics")[2]
with c.step("format"):
    fams = [*parse(before)]
    c.ok("each family has HELP and a TYPE", all(f.documentation and f.type != "unknown" for f in fams), fams)
    c.ok("no series comes twice", len(flat(before)) == sum(len(f.samples) for f in fams))
    counters = [s for f in fams if f.type == "counter" for s in f.samples]
    c.ok("counters end in _total", all(s.name.endswith(("_total", "_created")) and s.value >= 0 for s in counters))
    for f in (f for f in fams if f.type == "histogram"):
        by = {}
        for s in f.samples:
            own = by.setdefault((*sorted((k, v) for k, v in s.labels.items() if k != "le"),), {"buckets": []})
            if s.name.endswith("_bucket"):
                own["buckets"].append((float(s.labels["le"]), s.value))
            else:
                own[s.name.removeprefix(f.name)] = s.value
        for own in by.values():
            bounds, counts = zip(*own["buckets"])
            c.ok(f"{f.name}: cumulative buckets", [*bounds] == sorted(bounds) and [*counts] == sorted(counts), own)
            c.ok(f"{f.name}: +Inf is _count", (bounds[-1], counts[-1]) == (float("inf"), own["_count"]), own)
            c.ok(f"{f.name}: there is a _sum", "_sum" in own, own)
with c.step("counters move with traffic"):
    for i in range(3):
        c.ok("200", http("POST", BASE + "/inference", {"prompt": f"Request {i}", "num_tokens": 5})[0] == 200)
    text = http("GET", BASE + "/metrics")[2]
    a, b = flat(before), flat(text)
    totals = {k: b[k] - a.get(k, 0) for k in b if k[0].endswith("_total")}
    c.ok(
        "no counter goes down; requests rise by 3, tokens by 15",
        {3, 15} <= {*totals.values()} and min(totals.values()) >= 0,
        totals,
    )
if tool := os.environ.get("PROMTOOL"):
    r = subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, text=True)
    c.ok("promtool check metrics is clean", r.returncode == 0, r.stdout + r.stderr)
c.done()
