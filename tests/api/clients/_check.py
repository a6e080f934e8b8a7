"""Shared by the acceptance scripts: named checks, a summary, an exit status."""

import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request


def _short(d):
    d = str(d)
    return d if len(d) <= 900 else d[:300] + " [...] " + d[-600:]


class Checks:
    def __init__(self, title):
        self.title, self.bad, self.good, self.soft, self.skipped = title, [], 0, [], []
        self.t0 = time.time()
        print(f"== {title}", flush=True)

    def ok(self, name, cond, detail=""):
        if cond:
            self.good += 1
            print(f"  PASS {name}", flush=True)
        else:
            self.bad.append(name)
            print(f"  FAIL {name}: {_short(detail)}", flush=True)
        return bool(cond)

    def warn(self, name, cond, detail=""):
        """A nicety: reported, never fails the run (unless STRICT=1)."""
        if os.environ.get("STRICT") == "1":
            return self.ok(name, cond, detail)
        if cond:
            self.good += 1
            print(f"  PASS {name}", flush=True)
        else:
            self.soft.append(name)
            print(f"  WARN {name}: {_short(detail)}", flush=True)
        return bool(cond)

    def skip(self, name, why):
        self.skipped.append(name)
        print(f"  SKIP {name}: {why}", flush=True)

    def step(self, name):
        """with c.step('x'): ...  - an exception inside is one failed check, not the end of the run."""
        return _Step(self, name)

    def done(self):
        print(
            f"== {self.title}: {self.good} passed, {len(self.bad)} failed, {len(self.soft)} warnings, "
            f"{len(self.skipped)} skipped, {time.time() - self.t0:.1f} s",
            flush=True,
        )
        for b in self.bad:
            print(f"   failed: {b}")
        sys.exit(1 if self.bad or not self.good else 0)


class _Step:
    def __init__(self, c, name):
        self.c, self.name = c, name

    def __enter__(self):
        return self

    def __exit__(self, et, ev, tb):
        if et is None or not issubclass(et, Exception):
            return False
        where = traceback.extract_tb(tb)[-1]
        self.c.ok(
            self.name + " runs", False, f"{et.__name__}: {ev} (at {os.path.basename(where.filename)}:{where.lineno})"
        )
        return True


def base_url():
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} BASE_URL   (for example http://127.0.0.1:8500)")
    return sys.argv[1].rstrip("/")


def http(method, url, obj=None, raw=None, headers=None, timeout=120):
    """(status, headers, text) without any third-party client; never raises on HTTP errors."""
    data = raw if raw is not None else (json.dumps(obj).encode() if obj is not None else None)
    h = {"Content-Type": "application/json"} if data is not None else {}
    h.update(headers or {})
    rq = urllib.request.Request(url, data=data, method=method, headers=h)
    try:
        with urllib.request.urlopen(rq, timeout=timeout) as r:
            return r.status, {k.lower(): v for k, v in r.headers.items()}, r.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        return e.code, {k.lower(): v for k, v in e.headers.items()}, e.read().decode("utf-8", "replace")


def model_name(base):
    m = os.environ.get("MODEL")
    if m:
        return m
    st, _, tx = http("GET", base + "/v1/models")
    if st != 200:
        sys.exit(f"FAIL GET {base}/v1/models -> {st} {tx[:200]}")
    return json.loads(tx)["data"][0]["id"]


def tokenizer_dir():
    d = os.environ.get("TOKENIZER_DIR") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "tok")
    if not os.path.exists(os.path.join(d, "tokenizer_config.json")) and not os.path.exists(
        os.path.join(d, "tokenizer.json")
    ):
        sys.exit(f"FAIL no tokenizer in {d}; set TOKENIZER_DIR to the directory of the served model's tokenizer")
    return os.path.abspath(d)
