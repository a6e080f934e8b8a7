#!/usr/bin/env python3
"""Acceptance with schemathesis 4 (tested with 4.32.5) on the server's own OpenAPI document, and openapi-spec-validator on the document.

usage: accept_schemathesis.py BASE_URL   env: OPENAPI_PATH (default: /openapi.json), MAX_EXAMPLES (20), CHECKS (all), EXCLUDE_CHECKS, ST_SEED (1), ST_CAP (tokens a call, 4)
"""

import json
import os
import re
import subprocess
import sys
import tempfile

from _check import Checks, base_url, http
from openapi_spec_validator import validate

UNENDING_OR_CHANGING = ("/events", "/policy", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
BASE = base_url()
DOC = os.environ.get("OPENAPI_PATH", "/openapi.json")
here = os.path.dirname(os.path.abspath(__file__))
c = Checks(f"schemathesis against {BASE}{DOC}")
with c.step("document"):
    st, h, tx = http("GET", BASE + DOC)
    c.ok(
        "the document is served as JSON", st == 200 and "json" in h.get("content-type", ""), (st, h.get("content-type"))
    )
    d = json.loads(tx)
    validate(d)
    c.ok("openapi-spec-validator accepts it", True)
    c.ok("OpenAPI 3.x", str(d.get("openapi", "")).startswith("3."), d.get("openapi"))
    want = {
        ("post", "/inference"),
        ("get", "/stats"),
        ("post", "/v1/completions"),
        ("get", "/v1/models"),
        ("post", "/generate"),
        ("post", "/generate_stream"),
        ("get", "/health"),
        ("get", "/metrics"),
    }
    have = {(m, p) for p, v in d["paths"].items() for m in v}
    c.ok("all routes are documented", want <= have, want - have)
    ids = [o.get("operationId") for v in d["paths"].values() for m, o in v.items() if m in ("get", "post")]
    c.ok("operationIds are unique and present", all(ids) and len(ids) == len(set(ids)), ids)
    st, h, tx = http("GET", BASE + "/docs")
    c.ok(
        "/docs is an HTML page",
        st == 200 and h.get("content-type", "").startswith("text/html"),
        (st, h.get("content-type")),
    )
    c.ok(
        "/docs needs no other host (offline)",
        not re.search(r"(?:src|href)=[\"']https?://", tx),
        re.findall(r"(?:src|href)=[\"']https?://[^\"']*", tx)[:3],
    )
with tempfile.TemporaryDirectory() as t:
    exe = os.path.join(os.path.dirname(sys.executable), "schemathesis")
    args = [
        exe,
        "run",
        BASE + DOC,
        "--checks",
        os.environ.get("CHECKS", "all"),
        "--phases",
        "examples,coverage,fuzzing",
        "-n",
        os.environ.get("MAX_EXAMPLES", "20"),
        "--seed",
        os.environ.get("ST_SEED", "1"),
        "--continue-on-failure",
        *(part for path in UNENDING_OR_CHANGING for part in ("--exclude-path", path)),
        "--request-timeout",
        "300",
        "--suppress-health-check",
        "all",
        "--no-color",
    ]
    if os.environ.get("EXCLUDE_CHECKS"):
        args += ["--exclude-checks", os.environ["EXCLUDE_CHECKS"]]
    r = subprocess.run(
        args,
        cwd=t,
        capture_output=True,
        text=True,
        timeout=6 * 3600,
        env=dict(os.environ, SCHEMATHESIS_HOOKS="schemathesis_hooks", PYTHONPATH=here),
    )
    tail = r.stdout[r.stdout.find("FAILURES") - 40 if "FAILURES" in r.stdout else -900 :]
    c.ok("schemathesis finds nothing", r.returncode == 0, "")
    if r.returncode:
        print("\n".join("    | " + x for x in tail.splitlines()[:220]))
    m = re.search(r"(\d+) generated", r.stdout)
    c.ok("at least 100 cases were sent", m and int(m.group(1)) >= 100, r.stdout[-500:])
    print("    ", m.group(0) if m else "")
c.ok("healthy afterwards", http("GET", BASE + "/health")[0] == 200)
c.done()
