"""Shared by the acceptance scripts: named checks, a summary, an exit status."""

import contextlib
import json
import os
import sys
import traceback
import urllib.error
import urllib.request


def _short(d):
    d = str(d)
    return d if len(d) <= 900 else d[:300] + " [...] " + d[-600:]


class Checks:
    def __init__(self, title):
        self.title, self.bad, self.good, self.soft = title, [], 0, []
        print(f"== {title}", flush=True)

    def ok(self, name, cond, detail="", word="FAIL"):
        if cond:
            self.good += 1
            print(f"  PASS {name}", flush=True)
        else:
            (self.bad if word == "FAIL" else self.soft).append(name)
            print(f"  {word} {name}: {_short(detail)}", flush=True)

    def warn(self, name, cond, detail=""):
        """A nicety: reported, never fails the run (unless STRICT=1)."""
        self.ok(name, cond, detail, "FAIL" if os.environ.get("STRICT") == "1" else "WARN")

    @contextlib.contextmanager
    def step(self, name):
        """with c.step('x'): ...  - an exception inside is one failed check, not the end of the run."""
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{os.path.basename(where.filename)}:{where.lineno}"
            self.ok(f"{name} runs", False, f"{type(error).__name__}: {error} (at {at})")

    def done(self):
        print(f"== {self.title}: {self.good} passed, {len(self.bad)} failed, {len(self.soft)} warnings", flush=True)
        for b in self.bad:
            print(f"   failed: {b}")
        sys.exit(1 if self.bad or not self.good else 0)


def http(method, url, obj=None):
    """(status, headers, text) without any third-party client; never raises on HTTP errors."""
    data = None if obj is None else json.dumps(obj).encode()
    rq = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        r = urllib.request.urlopen(rq, timeout=120)
    except urllib.error.HTTPError as error:
        r = error
    with r:
        return r.status, {k.lower(): v for k, v in r.headers.items()}, r.read().decode("utf-8", "replace")


def begin(title):
    """Return the address of the server that is named on the command line, its model, and the checks."""
    base = sys.argv[1].rstrip("/")
    model = json.loads(http("GET", base + "/v1/models")[2])["data"][0]["id"]
    return base, model, Checks(f"{title} against {base} model={model}")
