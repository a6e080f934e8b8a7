#!/usr/bin/env python3
"""Acceptance with the official `openai` Python client (tested with 3.51.0).

usage: accept_openai.py BASE_URL        env: MODEL, TOKENIZER_DIR (optional), STRICT=1, CONTEXT (default 1024)
"""

import asyncio
import itertools
import json
import os
import time

import openai
from _check import Checks, base_url, http, model_name
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

BASE = base_url()
MODEL = model_name(BASE)
CTX = int(os.environ.get("CONTEXT", "1024"))
c = Checks(f"openai {openai.__version__} against {BASE} model={MODEL}")
cl = OpenAI(base_url=BASE + "/v1", api_key="sk-anything", max_retries=0, timeout=300)
P = "The quick brown fox"
P2 = "Once upon a time there was a"


def comp(**kw):
    kw.setdefault("model", MODEL)
    kw.setdefault("prompt", P)
    return cl.completions.create(**kw)


def err_obj(e):
    """The wire error object: {'error': {message,type,param,code}}."""
    try:
        o = e.response.json()
    except Exception as x:
        return f"body is not JSON: {x}: {e.response.text[:200]}"
    o = o.get("error") if isinstance(o, dict) else None
    if not isinstance(o, dict):
        return f"no 'error' object in {e.response.text[:200]}"
    if not isinstance(o.get("message"), str) or not o["message"]:
        return "error.message is not a non-empty string"
    if not isinstance(o.get("type"), str):
        return "error.type is not a string"
    for k in ("param", "code"):
        if k not in o:
            return f"error.{k} is absent (null is allowed)"
    return None


def expect(name, exc, status, fn, code=None, param=None):
    try:
        r = fn()
        if hasattr(r, "__next__"):
            list(r)
        c.ok(name, False, "accepted, no error raised")
    except openai.APIStatusError as e:
        why = err_obj(e)
        good = isinstance(e, exc) and e.status_code == status and why is None
        c.ok(name, good, f"{type(e).__name__} {e.status_code} {why or e.response.text[:200]}")
        if good and code:
            c.warn(name + f": code={code}", e.code == code, e.code)
        if good and param:
            c.warn(name + f": param={param}", e.param == param, e.param)
    except Exception as e:
        c.ok(name, False, f"{type(e).__name__}: {e}")


# ---- models
with c.step("models.list"):
    ms = list(cl.models.list())
    c.ok("models.list has the served model", MODEL in [m.id for m in ms], ms)
    c.ok(
        "model object fields",
        all(m.object == "model" and isinstance(m.created, int) and isinstance(m.owned_by, str) for m in ms),
        ms,
    )
    c.ok("models.list object=list", json.loads(http("GET", BASE + "/v1/models")[2]).get("object") == "list")
with c.step("models.retrieve"):
    c.ok("models.retrieve", cl.models.retrieve(MODEL).id == MODEL)
expect(
    "models.retrieve of an unknown model is 404", openai.NotFoundError, 404, lambda: cl.models.retrieve("no-such-model")
)

# ---- one completion
base = None
with c.step("completion"):
    raw = cl.completions.with_raw_response.create(model=MODEL, prompt=P, max_tokens=8, temperature=0)
    d = json.loads(raw.text() if callable(getattr(raw, "text", None)) else raw.text)
    Completion.model_validate(d, strict=True)
    c.ok("body validates strictly as openai.types.Completion", True)
    c.ok("content-type is application/json", raw.headers.get("content-type", "").startswith("application/json"))
    base = raw.parse()
    c.ok(
        "object/model/id/created",
        base.object == "text_completion" and base.model == MODEL and base.id and abs(base.created - time.time()) < 300,
        base,
    )
    c.ok("one choice, index 0", len(base.choices) == 1 and base.choices[0].index == 0)
    c.ok("finish_reason length or stop", base.choices[0].finish_reason in ("length", "stop"))
    c.ok("logprobs is null when not asked for", base.choices[0].logprobs is None)
    u = base.usage
    c.ok(
        "usage adds up",
        u is not None and u.prompt_tokens > 0 and u.prompt_tokens + u.completion_tokens == u.total_tokens,
        u,
    )
    c.ok(
        "completion_tokens == max_tokens when finish is length",
        base.choices[0].finish_reason != "length" or u.completion_tokens == 8,
        u,
    )
    c.ok("greedy is repeatable", comp(max_tokens=8, temperature=0).choices[0].text == base.choices[0].text)
    c.ok("ids differ between calls", comp(max_tokens=1).id != base.id)
    c.warn("x-request-id response header", base._request_id is not None)
with c.step("defaults"):
    r = comp()
    c.ok(
        "max_tokens defaults to 16",
        r.usage.completion_tokens <= 16 and (r.choices[0].finish_reason != "length" or r.usage.completion_tokens == 16),
        r.usage,
    )

# ---- prompt forms
with c.step("prompt list of strings"):
    a = comp(prompt=P, max_tokens=6, temperature=0).choices[0].text
    b = comp(prompt=P2, max_tokens=6, temperature=0).choices[0].text
    r = comp(prompt=[P, P2], max_tokens=6, temperature=0)
    c.ok(
        "two prompts: two choices in order",
        [x.index for x in r.choices] == [0, 1] and [x.text for x in r.choices] == [a, b],
        r.choices,
    )
    c.ok(
        "two prompts: usage is summed",
        r.usage.completion_tokens >= 2 and r.usage.prompt_tokens > base.usage.prompt_tokens,
        r.usage,
    )
    ids = None
    st, _, tx = http("POST", BASE + "/tokenize", {"prompt": P, "add_special_tokens": False})
    if st == 200 and isinstance(json.loads(tx), dict) and isinstance(json.loads(tx).get("tokens"), list):
        ids = json.loads(tx)["tokens"]
    elif os.environ.get("TOKENIZER_DIR"):
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(os.environ["TOKENIZER_DIR"] + "/tokenizer.json").encode(P).ids
    if ids:
        c.ok("prompt as token ids", comp(prompt=ids, max_tokens=6, temperature=0).choices[0].text == a)
        c.ok(
            "prompt as list of token-id lists",
            [x.text for x in comp(prompt=[ids, ids], max_tokens=6, temperature=0).choices] == [a, a],
        )
        c.ok(
            "prompt token count equals the tokenizer's",
            base.usage.prompt_tokens == len(ids),
            (base.usage.prompt_tokens, ids),
        )
    else:
        c.skip("prompt as token ids", "no /tokenize on the server and no TOKENIZER_DIR")
with c.step("awkward prompts"):
    for name, p in (
        ("unicode", "Ünïcödé 漢字 🙂"),
        ("special token text", "a <|endoftext|> b"),
        ("newlines and tabs", "a\n\n\tb "),
        ("one space", " "),
    ):
        r = comp(prompt=p, max_tokens=3, temperature=0, echo=True)
        c.ok(f"prompt with {name} is echoed unchanged", r.choices[0].text.startswith(p), repr(r.choices[0].text))

# ---- n, seed, sampling
with c.step("n"):
    r = comp(n=3, max_tokens=6, temperature=1.0)
    c.ok("n=3 gives indexes 0,1,2", sorted(x.index for x in r.choices) == [0, 1, 2])
    c.ok(
        "n=3 usage counts all choices, the prompt once",
        r.usage.completion_tokens > 6 and r.usage.prompt_tokens == base.usage.prompt_tokens,
        r.usage,
    )
    r = comp(n=2, max_tokens=6, temperature=0, prompt=[P, P2])
    t = [x.text for x in sorted(r.choices, key=lambda x: x.index)]
    c.ok("n=2 with two prompts: index = prompt*n + j", len(t) == 4 and t[0] == t[1] == a and t[2] == t[3] == b, t)
with c.step("seed"):
    s = [comp(max_tokens=12, temperature=1.0, seed=7).choices[0].text for _ in range(2)]
    c.ok("same seed, same text", s[0] == s[1], s)
    c.ok(
        "other seeds give other texts",
        len({comp(max_tokens=12, temperature=1.0, seed=k).choices[0].text for k in range(4)}) > 1,
    )
    c.ok(
        "temperature 0 equals top_k-like limit top_p=tiny",
        comp(max_tokens=6, temperature=1.0, top_p=1e-6, seed=1).choices[0].text == a,
    )

# ---- stop
with c.step("stop"):
    full = comp(max_tokens=24, temperature=0).choices[0].text
    cand = [full[i : i + 3] for i in range(4, len(full) - 3) if "\ufffd" not in full[i : i + 3]]
    stop = cand[len(cand) // 2]
    want = full[: full.find(stop)]
    r = comp(max_tokens=24, temperature=0, stop=stop)
    c.ok("stop string ends the text and is not in it", r.choices[0].text == want, (stop, r.choices[0].text, want))
    c.ok("finish_reason is stop", r.choices[0].finish_reason == "stop", r.choices[0].finish_reason)
    c.ok("stop as a list", comp(max_tokens=24, temperature=0, stop=["@@never@@", stop]).choices[0].text == want)
    got = "".join(x.choices[0].text for x in comp(max_tokens=24, temperature=0, stop=stop, stream=True) if x.choices)
    c.ok("stop while streaming never leaks a part of the stop string", got == want, (stop, got, want))
    found = False
    for p in (P, P2, "def main():", "In the year 1900 the"):
        parts = [z.choices[0].text for z in comp(prompt=p, max_tokens=24, temperature=0, stream=True) if z.choices]
        text, pos = "".join(parts), 0
        for x, y in itertools.pairwise(parts):
            pos += len(x)
            st2 = x[-2:] + y[:2]
            if pos > 3 and x and y and "\ufffd" not in st2 and text.find(st2) == pos - len(x[-2:]):
                w2 = text[: text.find(st2)]
                got = "".join(
                    z.choices[0].text
                    for z in comp(prompt=p, max_tokens=24, temperature=0, stop=st2, stream=True)
                    if z.choices
                )
                c.ok("a stop string across two tokens: the stream holds back its first half", got == w2, (st2, got, w2))
                r = comp(prompt=p, max_tokens=24, temperature=0, stop=st2)
                c.ok(
                    "a stop string across two tokens: whole text",
                    r.choices[0].text == w2 and r.choices[0].finish_reason == "stop",
                    (st2, r, w2),
                )
                found = True
                break
        if found:
            break
    if not found:
        c.skip("a stop string across two tokens", "no suitable token pair in the greedy texts")
    c.ok(
        "a stop string that never occurs changes nothing",
        comp(max_tokens=24, temperature=0, stop="@@never@@").choices[0].text == full,
    )

# ---- logprobs and echo
with c.step("logprobs"):
    r = comp(max_tokens=8, temperature=0, logprobs=3)
    ch, lp = r.choices[0], r.choices[0].logprobs
    n = len(lp.tokens)
    c.ok(
        "logprobs arrays have equal length",
        n == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset),
        lp,
    )
    c.ok("one entry a completion token", n in (r.usage.completion_tokens, r.usage.completion_tokens - 1), (n, r.usage))
    c.ok("all log-probabilities are <= 0", all(v <= 1e-6 for v in lp.token_logprobs))
    c.ok(
        "3 or 4 alternatives each, mass <= 1",
        all(3 <= len(t) <= 4 and sum(2.718281828**v for v in t.values()) < 1.001 for t in lp.top_logprobs),
        lp.top_logprobs,
    )
    c.ok(
        "greedy: the chosen token is exactly the largest alternative (lm-eval compares floats)",
        all(v == max(t.values()) for v, t in zip(lp.token_logprobs, lp.top_logprobs)),
    )
    c.ok(
        "tokens join to the text",
        "".join(lp.tokens) == ch.text or any(t.startswith("bytes:") or "\ufffd" in t for t in lp.tokens),
        (lp.tokens, ch.text),
    )
    c.ok(
        "text_offset does not decrease", all(x <= y for x, y in zip(lp.text_offset, lp.text_offset[1:])), lp.text_offset
    )
    c.warn("text_offset starts at len(prompt)", lp.text_offset[0] == len(P), lp.text_offset)
    c.ok("asking for logprobs does not change the text", comp(max_tokens=8, temperature=0).choices[0].text == ch.text)
with c.step("echo"):
    r = comp(max_tokens=4, temperature=0, echo=True)
    c.ok(
        "echo puts the prompt first",
        r.choices[0].text.startswith(P) and len(r.choices[0].text) > len(P),
        r.choices[0].text,
    )
    r = comp(max_tokens=1, temperature=0, echo=True, logprobs=1)
    lp = r.choices[0].logprobs
    c.ok(
        "echo+logprobs covers prompt and completion",
        len(lp.tokens) in (r.usage.total_tokens, r.usage.total_tokens - 1),
        (len(lp.tokens), r.usage),
    )
    c.ok(
        "the first token has null logprob and null top_logprobs",
        lp.token_logprobs[0] is None and lp.top_logprobs[0] is None,
        (lp.token_logprobs[0], lp.top_logprobs[0]),
    )
    c.ok("the others are numbers", all(isinstance(v, float) for v in lp.token_logprobs[1:]))
    c.ok(
        "each scored token is among its alternatives with exactly the same float (lm-eval's is_greedy)",
        all(v in t.values() for v, t in zip(lp.token_logprobs[1:], lp.top_logprobs[1:])),
        (lp.token_logprobs, lp.top_logprobs),
    )
    c.ok("text_offset starts at 0", lp.text_offset[0] == 0, lp.text_offset)
    c.ok(
        "echoed tokens join to the text",
        "".join(lp.tokens) == r.choices[0].text or any(t.startswith("bytes:") or "\ufffd" in t for t in lp.tokens),
    )
    g = comp(max_tokens=6, temperature=0, logprobs=1, prompt=P)
    e = comp(max_tokens=1, temperature=0, logprobs=1, echo=True, prompt=P + g.choices[0].text)
    gl, el, k = g.choices[0].logprobs, e.choices[0].logprobs, g.usage.prompt_tokens
    m = len(gl.tokens)
    if el.tokens[k : k + m] == gl.tokens:
        diff = max(abs(x - y) for x, y in zip(gl.token_logprobs, el.token_logprobs[k : k + m]))
        c.ok("scoring a generated text gives the generation's logprobs (1e-2)", diff < 1e-2, diff)
    else:
        c.skip("scoring a generated text", "it tokenizes differently when read back")
    if ids and len(ids) > 2:
        el = comp(max_tokens=1, temperature=0, logprobs=1, echo=True, prompt=ids).choices[0].logprobs
        diff = []
        for k in {1, len(ids) // 2, len(ids) - 1}:
            one = comp(max_tokens=1, temperature=0, logprobs=1, prompt=ids[:k]).choices[0].logprobs
            diff.append(abs(max(el.top_logprobs[k].values()) - one.token_logprobs[0]))
        c.ok("echo scoring at position k equals generation from the first k tokens (1e-2)", max(diff) < 1e-2, diff)
    try:
        z = comp(max_tokens=0, temperature=0, echo=True, logprobs=1)
        c.warn("max_tokens=0 with echo scores only", z.usage.completion_tokens == 0 and z.choices[0].text == P, z)
    except openai.APIStatusError as x:
        c.warn("max_tokens=0 with echo scores only", False, x)

# ---- streaming
with c.step("stream"):
    for _ in range(3):  # a busy machine may be late with the first chunk
        t0, arr, chunks = time.time(), [], []
        for x in comp(max_tokens=24, temperature=0, stream=True):
            arr.append(time.time() - t0)
            chunks.append(x)
        tot = time.time() - t0
        if arr[0] < 0.7 * tot:
            break
    c.ok("more than one chunk", len(chunks) > 1, len(chunks))
    c.ok("joined stream equals the whole text", "".join(x.choices[0].text for x in chunks if x.choices) == full)
    c.ok(
        "same id, object and model in all chunks",
        len({x.id for x in chunks}) == 1 and all(x.object == "text_completion" and x.model == MODEL for x in chunks),
    )
    fr = [x.choices[0].finish_reason for x in chunks if x.choices]
    c.ok(
        "finish_reason null until the last chunk, then set once",
        all(f is None for f in fr[:-1]) and fr[-1] in ("length", "stop"),
        fr,
    )
    c.ok("no usage chunk unless asked for", all(x.choices for x in chunks) and all(x.usage is None for x in chunks))
    if tot > 0.3:
        c.ok("the first chunk arrives well before the end (not buffered)", arr[0] < 0.7 * tot, (arr[0], tot))
    else:
        c.skip("incremental arrival", f"whole stream took {tot:.3f} s")
    whole = comp(max_tokens=24, temperature=0)
    chunks = list(comp(max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}))
    c.ok(
        "include_usage: last chunk has no choices and the same usage",
        chunks[-1].choices == []
        and chunks[-1].usage.total_tokens == whole.usage.total_tokens
        and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens,
        chunks[-1],
    )
    c.ok("include_usage: null in the other chunks", all(x.usage is None for x in chunks[:-1]))
    chunks = list(comp(max_tokens=6, temperature=0, stream=True, n=2, prompt=[P, P2]))
    tx = {}
    for x in chunks:
        for ch in x.choices:
            tx[ch.index] = tx.get(ch.index, "") + ch.text
    c.ok("stream with n and several prompts", [tx.get(i) for i in range(4)] == [a, a, b, b], tx)
    toks = [
        t
        for x in comp(max_tokens=8, temperature=0, stream=True, logprobs=2)
        for t in (x.choices[0].logprobs.tokens if x.choices and x.choices[0].logprobs else [])
    ]
    c.ok(
        "stream with logprobs has the same tokens",
        toks == comp(max_tokens=8, temperature=0, logprobs=2).choices[0].logprobs.tokens,
        toks,
    )
    got = "".join(x.choices[0].text for x in comp(max_tokens=4, temperature=0, stream=True, echo=True) if x.choices)
    c.ok("stream with echo", got == comp(max_tokens=4, temperature=0, echo=True).choices[0].text, got)
with c.step("raw SSE"):
    with cl.completions.with_streaming_response.create(
        model=MODEL, prompt=P, max_tokens=5, temperature=0, stream=True
    ) as r:
        ct, txt = r.headers.get("content-type", ""), b"".join(r.iter_bytes()).decode()
    ev = [e for e in txt.replace("\r\n", "\n").split("\n\n") if e.strip()]
    c.ok("content-type is text/event-stream", ct.startswith("text/event-stream"), ct)
    c.ok(
        "events are single 'data: {json}' lines ended by a blank line",
        all(e.startswith("data: ") and "\n" not in e for e in ev if not e.startswith(":")) and txt.endswith("\n\n"),
        ev[:2],
    )
    c.ok("the last event is data: [DONE]", ev[-1] == "data: [DONE]", ev[-1])
    c.ok(
        "every other event is JSON", all(isinstance(json.loads(e[6:]), dict) for e in ev[:-1] if not e.startswith(":"))
    )

# ---- accepted extras (sent by vLLM / sglang / guidellm / lm-eval / LangChain)
with c.step("extras"):
    r = comp(
        max_tokens=5,
        temperature=0,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        user="u",
        best_of=1,
        suffix=None,
        extra_body={
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            "top_k": -1,
            "min_tokens": 0,
            "use_beam_search": False,
            "unknown_field_xyz": 1,
        },
    )
    c.ok("vLLM-style extras are accepted", r.usage.completion_tokens == 5, r.usage)
    x = list(comp(max_tokens=3, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    c.ok("stream_options.continuous_usage_stats is accepted (guidellm)", x[-1].usage is not None)

# ---- errors
B, NF = openai.BadRequestError, openai.NotFoundError
expect("unknown model is 404", NF, 404, lambda: comp(model="no-such-model"), code="model_not_found", param="model")
for name, kw in (
    ("temperature=-1", {"temperature": -1}),
    ("temperature=2.5", {"temperature": 2.5}),
    ("top_p=1.5", {"top_p": 1.5}),
    ("top_p=-0.1", {"top_p": -0.1}),
    ("max_tokens='abc'", {"max_tokens": "abc"}),
    ("max_tokens=1.5", {"max_tokens": 1.5}),
    ("n=0", {"n": 0}),
    ("n=-2", {"n": -2}),
    ("logprobs=100", {"logprobs": 100}),
    ("logprobs=-1", {"logprobs": -1}),
    ("stop=[1]", {"stop": [1]}),
    ("presence_penalty=5", {"presence_penalty": 5}),
    ("prompt=[]", {"prompt": []}),
    ("prompt={}", {"prompt": {"a": 1}}),
    ("prompt=null", {"prompt": None}),
    ("token id out of range", {"prompt": [10**9]}),
    ("negative token id", {"prompt": [-1]}),
    ("stream='yes'", {"extra_body": {"stream": "yes"}}),
    ("echo=3", {"echo": 3}),
    ("best_of < n", {"n": 3, "best_of": 2}),
    ("stream_options without stream", {"stream_options": {"include_usage": True}}),
    ("bad parameter while streaming is an HTTP error, not an event", {"stream": True, "temperature": -1}),
):
    expect(f"{name} is 400", B, 400, lambda kw=kw: comp(**kw))
expect(
    "prompt longer than the context is 400",
    B,
    400,
    lambda: comp(prompt="hello " * (3 * CTX)),
    code="context_length_exceeded",
)
expect("max_tokens larger than the context is 400", B, 400, lambda: comp(max_tokens=10 * CTX))
for name, m, path, raw, want in (
    ("malformed JSON is 400", "POST", "/v1/completions", b"{nope", 400),
    ("empty body is 400", "POST", "/v1/completions", b"", 400),
    ("a JSON array is 400", "POST", "/v1/completions", b"[1]", 400),
    ("invalid UTF-8 is 400", "POST", "/v1/completions", b'{"prompt":"\xff"}', 400),
    ("no prompt is 400", "POST", "/v1/completions", json.dumps({"model": MODEL}).encode(), 400),
    ("GET is 405", "GET", "/v1/completions", None, 405),
    ("unknown path is 404", "GET", "/v1/nothing", None, 404),
):
    with c.step(name):
        st, h, tx = http(m, BASE + path, raw=raw)
        try:
            o = json.loads(tx).get("error")
        except ValueError:
            o = None
        c.ok(
            name + " with a JSON error object",
            st == want and isinstance(o, dict) and isinstance(o.get("message"), str),
            (st, tx[:200]),
        )


# ---- concurrency: what a request gets must not depend on what else is in the batch
async def many():
    ac = AsyncOpenAI(base_url=BASE + "/v1", api_key="x", max_retries=0, timeout=600)
    jobs = [(f"{'word ' * (1 + 5 * (i % 4))}number {i}", 1 + (7 * i) % 23) for i in range(16)]
    alone = []
    for p, k in jobs:
        alone.append(await ac.completions.create(model=MODEL, prompt=p, max_tokens=k, temperature=0, logprobs=2))

    async def one(p, k, stream):
        if not stream:
            return (await ac.completions.create(model=MODEL, prompt=p, max_tokens=k, temperature=0)).choices[0].text
        s = await ac.completions.create(model=MODEL, prompt=p, max_tokens=k, temperature=0, stream=True)
        return "".join([x.choices[0].text async for x in s if x.choices])

    got = await asyncio.gather(*[one(p, k, i % 2) for i, (p, k) in enumerate(jobs)])
    bad = []
    for i, (g, al) in enumerate(zip(got, alone)):
        w = al.choices[0].text
        if g == w:
            continue
        gaps = [sorted(t.values())[-1] - sorted(t.values())[-2] for t in al.choices[0].logprobs.top_logprobs]
        if min(gaps) > 1e-3:  # not a numerical tie
            bad.append((i, w, g))
    c.ok("16 concurrent requests of mixed lengths give the texts they give alone", not bad, bad[:2])
    s = await ac.completions.create(model=MODEL, prompt=P, max_tokens=200, temperature=0, stream=True)
    async for _ in s:
        break
    await s.close()
    t = time.time()
    r = await asyncio.wait_for(ac.completions.create(model=MODEL, prompt=P, max_tokens=2, temperature=0), 120)
    c.ok("the server serves on after a client hung up mid-stream", r.usage.completion_tokens >= 1, time.time() - t)
    await ac.close()


with c.step("concurrency"):
    asyncio.run(many())
c.done()
