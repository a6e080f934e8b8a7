#!/usr/bin/env python3
"""Acceptance of /metrics with prometheus_client's parsers (tested with 0.26.0) and, when PROMTOOL is set, `promtool check metrics`.

usage: accept_prometheus.py BASE_URL   env: PROMTOOL=/path/to/promtool (Debian package prometheus), REQUEST_PATH (default: /inference, then /v1/completions)
"""

import os
import re
import subprocess

from _check import Checks, base_url, http, model_name
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_om
from prometheus_client.parser import text_string_to_metric_families as parse_text

BASE = base_url()
c = Checks(f"prometheus_client parser on {BASE}/metrics")


def scrape(**h):
    st, hd, tx = http("GET", BASE + "/metrics", headers=h)
    return st, hd, tx


def flat(tx):
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in parse_text(tx) for s in f.samples}


with c.step("scrape"):
    st, hd, tx = scrape()
    c.ok("GET /metrics is 200", st == 200, st)
    ct = hd.get("content-type", "")
    c.ok(
        "content-type is text/plain; version=0.0.4 (or 1.0.0) with charset utf-8",
        re.match(r"text/plain;\s*version=(0\.0\.4|1\.0\.0)", ct) and "charset=utf-8" in ct,
        ct,
    )
    c.ok("the text ends with a newline", tx.endswith("\n"))
    fams = list(parse_text(tx))
    c.ok("it parses, with at least 5 families", len(fams) >= 5, len(fams))
    names = [f.name for f in fams]
    c.ok("each family appears once", len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1))
    c.ok(
        "each family has HELP and a TYPE",
        all(f.documentation for f in fams) and all(f.type != "unknown" for f in fams),
        [f.name for f in fams if not f.documentation or f.type == "unknown"],
    )
    keys = [(s.name, tuple(sorted(s.labels.items()))) for f in fams for s in f.samples]
    c.ok("no duplicate series", len(keys) == len(set(keys)))
    c.ok(
        "there is a counter, a gauge and a histogram",
        {"counter", "gauge", "histogram"} <= {f.type for f in fams},
        {f.name: f.type for f in fams},
    )
    for f in fams:
        if f.type == "counter":
            c.ok(
                f"counter {f.name}: samples end in _total (or _created) and are >= 0",
                all(s.name.endswith(("_total", "_created")) and s.value >= 0 for s in f.samples),
                f.samples[:2],
            )
        if f.type == "histogram":
            by = {}
            for s in f.samples:
                labels = tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))
                by.setdefault(labels, {"b": []})
                if s.name.endswith("_bucket"):
                    by[labels]["b"].append((float(s.labels["le"]), s.value))
                else:
                    by[labels][s.name.rsplit("_", 1)[1]] = s.value
            good = all(
                v["b"]
                and v["b"] == sorted(v["b"])
                and [y for _, y in v["b"]] == sorted(y for _, y in v["b"])
                and v["b"][-1][0] == float("inf")
                and v["b"][-1][1] == v.get("count")
                and "sum" in v
                for v in by.values()
            )
            c.ok(f"histogram {f.name}: sorted cumulative buckets, +Inf == _count, _sum", good, by)
            c.ok(f"histogram {f.name}: label bodies carry no prompt text (few series)", len(by) <= 100, len(by))
with c.step("OpenMetrics negotiation"):
    st, hd, tx = scrape(Accept="application/openmetrics-text; version=1.0.0; charset=utf-8")
    if hd.get("content-type", "").startswith("application/openmetrics-text"):
        c.ok("OpenMetrics body parses and ends with # EOF", len(list(parse_om(tx))) > 0 and tx.endswith("# EOF\n"))
    else:
        c.ok(
            "text format is served when OpenMetrics is asked for and not offered",
            st == 200 and len(list(parse_text(tx))) > 0,
            st,
        )
with c.step("counters move with traffic"):
    a = flat(scrape()[2])
    want = 5
    for i in range(3):
        st, _, t = http("POST", BASE + "/inference", {"prompt": f"Request {i}", "num_tokens": want})
        if st != 200:
            st, _, t = http(
                "POST",
                BASE + "/v1/completions",
                {"model": model_name(BASE), "prompt": f"Request {i}", "max_tokens": want, "ignore_eos": True},
            )
        c.ok(f"request {i} is 200", st == 200, (st, t[:200]))
    b = flat(scrape()[2])
    totals = {k: b[k] - a.get(k, 0) for k in b if k[0].endswith("_total")}
    c.ok("no counter went down", all(v >= 0 for v in totals.values()), {k: v for k, v in totals.items() if v < 0})
    c.ok("some request counter rose by 3", any(v == 3 for v in totals.values()), totals)
    c.ok("some token counter rose by 15", any(v == 3 * want for v in totals.values()), totals)
    counts = {k: b[k] - a.get(k, 0) for k in b if k[0].endswith("_count")}
    c.ok("some latency histogram observed the 3 requests", any(v >= 3 for v in counts.values()), counts)
with c.step("promtool"):
    pt = os.environ.get("PROMTOOL")
    if not pt:
        c.skip("promtool check metrics", "PROMTOOL not set")
    else:
        r = subprocess.run([pt, "check", "metrics"], input=scrape()[2], capture_output=True, text=True)
        c.ok("promtool check metrics is clean", r.returncode == 0, r.stdout + r.stderr)
c.done()
