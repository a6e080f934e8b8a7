"""Keeps a schemathesis run cheap: *valid* large token counts become small before the call; invalid values are left alone."""

import os

import schemathesis

CAP = int(os.environ.get("ST_CAP", "4"))


def small(d, key, top):
    v = d.get(key)
    if isinstance(v, (int, float)) and not isinstance(v, bool) and CAP < v <= top and float(v).is_integer():
        d[key] = CAP


@schemathesis.hook
def before_call(context, case, kwargs):
    b = case.body
    if not isinstance(b, dict):
        return
    for d in (b, b.get("parameters")):
        if isinstance(d, dict):
            for key in ("max_tokens", "num_tokens", "max_new_tokens"):
                small(d, key, 1023)
            for key in ("n", "best_of"):
                v = d.get(key)
                if isinstance(v, int) and not isinstance(v, bool) and 2 < v <= 16:
                    d[key] = 2
    if "max_tokens" not in b and "prompt" in b and "num_tokens" not in b:
        b["max_tokens"] = CAP
    p = b.get("parameters")
    if "inputs" in b and (p is None or (isinstance(p, dict) and p.get("max_new_tokens") is None)):
        b["parameters"] = dict(p or {}, max_new_tokens=CAP)
