#!/usr/bin/env python3
"""Acceptance with Hugging Face's `text-generation` client 0.7.0 (the client of TGI; sync and async).

This client POSTs to the base URL itself (path "/", a `stream` flag in the body) and wants a JSON *array* back when it does not
stream, so TGI's compat route POST / is needed; /generate and /generate_stream are driven too.

usage: accept_tgi.py BASE_URL     env: TGI_OPENAPI=path of TGI's docs/openapi.json (optional: also validate against TGI's own schema)
"""

import asyncio
import json
import os
import re
import warnings

warnings.simplefilter("ignore")
import text_generation
from text_generation import AsyncClient, Client
from text_generation import errors as E
from text_generation.types import FinishReason, Grammar, GrammarType

warnings.simplefilter("ignore")
from _check import Checks, base_url, http

BASE = base_url()
c = Checks(f"text-generation {text_generation.__version__} against {BASE}")
cl = Client(BASE, timeout=300)
P = "What is deep learning?"


def expect(name, exc, fn):
    try:
        r = fn()
        if hasattr(r, "__next__"):
            list(r)
        c.ok(name, False, "accepted, no error raised")
    except exc:
        c.ok(name, True)
    except Exception as e:
        c.ok(name, False, f"{type(e).__name__}: {str(e)[:200]}")


def joined(tokens):
    return "".join(t.text for t in tokens if not t.special)


def same_text(pieces, whole):
    return pieces == whole or "\ufffd" in pieces + whole


with c.step("grammar"):
    form = {"enum": ["left", "right"]}
    for kind, value, right in (
        (GrammarType.Json, form, lambda text: json.loads(text) in form["enum"]),
        (GrammarType.Regex, "[0-9]{3}-[0-9]{2}", lambda text: re.fullmatch("[0-9]{3}-[0-9]{2}", text)),
    ):
        grammar = Grammar(type=kind, value=value)
        whole = cl.generate(P, grammar=grammar, max_new_tokens=50).generated_text
        c.ok(f"grammar {kind.value}", right(whole), whole)
        pieces = joined(part.token for part in cl.generate_stream(P, grammar=grammar, max_new_tokens=50))
        c.ok(f"grammar {kind.value} in a stream", pieces == whole, pieces)
    broken = Grammar(type=GrammarType.Regex, value="(")
    expect("a bad grammar is refused", E.ValidationError, lambda: cl.generate(P, grammar=broken))
with c.step("generate"):
    r = cl.generate(P, max_new_tokens=10, decoder_input_details=True)
    d = r.details
    c.ok(
        "10 tokens, finish_reason length",
        (d.generated_tokens == 10 and d.finish_reason == FinishReason.Length)
        or d.finish_reason == FinishReason.EndOfSequenceToken,
        d,
    )
    c.ok("details.tokens has one entry a token", len(d.tokens) == d.generated_tokens)
    c.ok(
        "token texts join to generated_text",
        same_text(joined(d.tokens), r.generated_text),
        (joined(d.tokens), r.generated_text),
    )
    c.ok("token logprobs are numbers <= 0", all(t.logprob is not None and t.logprob <= 1e-6 for t in d.tokens))
    c.ok("greedy has no seed", d.seed is None, d.seed)
    c.ok(
        "prefill is the prompt, first logprob null",
        len(d.prefill) > 1 and d.prefill[0].logprob is None and all(t.logprob is not None for t in d.prefill[1:]),
        d.prefill,
    )
    c.ok("prefill texts join to the prompt", "".join(t.text for t in d.prefill) == P, [t.text for t in d.prefill])
    c.ok("prefill is empty when not asked for", cl.generate(P, max_new_tokens=1).details.prefill == [])
    c.ok("greedy is repeatable", cl.generate(P, max_new_tokens=10).generated_text == r.generated_text)
    c.ok("max_new_tokens defaults to 20 in this client", cl.generate(P).details.generated_tokens <= 20)
    f = cl.generate(P, max_new_tokens=3, return_full_text=True)
    c.ok(
        "return_full_text prepends the prompt",
        f.generated_text.startswith(P) and len(f.generated_text) > len(P),
        f.generated_text,
    )
with c.step("sampling"):
    a = cl.generate(P, max_new_tokens=10, do_sample=True, seed=5, temperature=0.9, top_k=40, top_p=0.95)
    b = cl.generate(P, max_new_tokens=10, do_sample=True, seed=5, temperature=0.9, top_k=40, top_p=0.95)
    c.ok(
        "same seed, same text, and the seed is reported",
        a.generated_text == b.generated_text and a.details.seed == 5,
        (a.details.seed, a.generated_text, b.generated_text),
    )
    s = cl.generate(P, max_new_tokens=5, do_sample=True)
    c.ok("a sampled request without a seed reports the seed it used", s.details.seed is not None)
    k1 = cl.generate(P, max_new_tokens=5, do_sample=True, top_k=1, seed=1)
    c.ok("top_k=1 sampling equals greedy", k1.generated_text == cl.generate(P, max_new_tokens=5).generated_text)
    t = cl.generate(P, max_new_tokens=4, top_n_tokens=3)
    c.ok(
        "top_n_tokens",
        t.details.top_tokens is not None
        and len(t.details.top_tokens) == len(t.details.tokens)
        and all(len(x) >= 3 for x in t.details.top_tokens),
        t.details.top_tokens,
    )
    tr = cl.generate("word " * 50, max_new_tokens=1, truncate=4, decoder_input_details=True)
    c.ok("truncate keeps the last tokens", len(tr.details.prefill) == 4, len(tr.details.prefill))
with c.step("stop"):
    full = cl.generate(P, max_new_tokens=24).generated_text
    cand = [full[i : i + 3] for i in range(4, len(full) - 3) if "\ufffd" not in full[i : i + 3]]
    stop = cand[len(cand) // 2]
    r = cl.generate(P, max_new_tokens=24, stop_sequences=[stop])
    c.ok(
        "finish_reason is stop_sequence", r.details.finish_reason == FinishReason.StopSequence, r.details.finish_reason
    )
    upto = full[: full.find(stop)]
    c.ok(
        "generation ends at the stop sequence (TGI keeps it in the text)",
        r.generated_text.startswith(upto) and len(r.generated_text) < len(full) and full.startswith(r.generated_text),
        (stop, r.generated_text),
    )
    c.ok("fewer tokens than allowed", r.details.generated_tokens < 24)
with c.step("generate_stream"):
    ev = list(cl.generate_stream(P, max_new_tokens=10))
    whole = cl.generate(P, max_new_tokens=10)
    c.ok("one event a token", len(ev) == whole.details.generated_tokens, len(ev))
    c.ok(
        "only the last event has generated_text and details",
        all(e.generated_text is None and e.details is None for e in ev[:-1])
        and ev[-1].generated_text is not None
        and ev[-1].details is not None,
    )
    c.ok(
        "same tokens, ids and logprobs as generate",
        [e.token.id for e in ev] == [t.id for t in whole.details.tokens]
        and all(abs(e.token.logprob - t.logprob) < 1e-2 for e, t in zip(ev, whole.details.tokens)),
    )
    c.ok("same text as generate", ev[-1].generated_text == whole.generated_text)
    c.ok("events join to the text", same_text(joined([e.token for e in ev]), whole.generated_text))
    c.ok(
        "details say length, 10 tokens",
        ev[-1].details.finish_reason == whole.details.finish_reason and ev[-1].details.generated_tokens == len(ev),
    )
    ev = list(cl.generate_stream(P, max_new_tokens=4, top_n_tokens=2))
    c.ok("top_n_tokens in the stream", all(e.top_tokens and len(e.top_tokens) >= 2 for e in ev))
    ev = list(cl.generate_stream(P, max_new_tokens=24, stop_sequences=[stop]))
    c.ok("stop in the stream", ev[-1].details.finish_reason == FinishReason.StopSequence)

with c.step("/generate_stream and /generate"):
    ev2 = list(Client(BASE + "/generate_stream", timeout=300).generate_stream(P, max_new_tokens=10))
    c.ok(
        "Client(URL/generate_stream) gives the same events as POST /",
        [e.token.id for e in ev2] == [t.id for t in whole.details.tokens]
        and ev2[-1].generated_text == whole.generated_text,
    )
    st, h, tx = http(
        "POST",
        BASE + "/generate",
        {"inputs": P, "parameters": {"max_new_tokens": 10, "details": True}, "stream": False},
    )
    c.ok(
        "/generate: 200 and a JSON object (not an array)",
        st == 200 and isinstance(json.loads(tx), dict),
        (st, tx[:200]),
    )
    g = text_generation.types.Response(**json.loads(tx))
    c.ok(
        "/generate gives the same text and tokens as POST /",
        g.generated_text == whole.generated_text
        and [t.id for t in g.details.tokens] == [t.id for t in whole.details.tokens],
    )

for name, fn in (
    ("max_new_tokens beyond the context", lambda: cl.generate("test", max_new_tokens=10_000)),
    ("prompt beyond the context", lambda: cl.generate("hello " * 4000, max_new_tokens=5)),
    ("max_new_tokens=0", lambda: cl.generate("test", max_new_tokens=0)),
    ("the same in a stream: an HTTP error before any event", lambda: cl.generate_stream("test", max_new_tokens=10_000)),
):
    expect(f"{name} raises ValidationError", E.ValidationError, fn)
expect("unknown path raises NotFoundError", E.NotFoundError, lambda: Client(BASE + "/fake/model").generate("test"))
for name, body in (
    ("empty inputs", {"inputs": ""}),
    ("no inputs", {"parameters": {}}),
    ("inputs a list", {"inputs": ["a"]}),
    ("temperature 0", {"inputs": "a", "parameters": {"temperature": 0}}),
    ("temperature -1", {"inputs": "a", "parameters": {"temperature": -1}}),
    ("top_p 1.5", {"inputs": "a", "parameters": {"top_p": 1.5}}),
    ("top_k 0", {"inputs": "a", "parameters": {"top_k": 0}}),
    ("max_new_tokens 'x'", {"inputs": "a", "parameters": {"max_new_tokens": "x"}}),
    ("best_of 2", {"inputs": "a", "parameters": {"best_of": 2}}),
):
    with c.step(name):
        st, h, tx = http("POST", BASE + "/generate", body)
        o = json.loads(tx)
        c.ok(
            f"{name}: 422 with error and error_type=validation",
            st == 422 and isinstance(o.get("error"), str) and o.get("error_type") == "validation",
            (st, tx[:200]),
        )


async def many():
    ac = AsyncClient(BASE, timeout=600)
    jobs = [(f"{'word ' * (1 + 5 * (i % 4))}number {i}", 1 + (7 * i) % 23) for i in range(12)]
    alone = [(await ac.generate(p, max_new_tokens=k, top_n_tokens=2)) for p, k in jobs]

    async def st(p, k):
        last = None
        async for e in ac.generate_stream(p, max_new_tokens=k):
            last = e
        return last.generated_text

    async def ge(p, k):
        return (await ac.generate(p, max_new_tokens=k)).generated_text

    got = await asyncio.gather(*[(st if i % 2 else ge)(p, k) for i, (p, k) in enumerate(jobs)])
    bad = []
    for g, a in zip(got, alone):
        gaps = [sorted(x.logprob for x in t)[-1] - sorted(x.logprob for x in t)[-2] for t in a.details.top_tokens]
        if g != a.generated_text and min(gaps) > 1e-3:
            bad.append((a.generated_text, g))
    c.ok("AsyncClient: 12 concurrent requests give the texts they give alone", not bad, bad[:1])


with c.step("concurrency"):
    asyncio.run(many())


# ---- TGI's published OpenAPI document as the judge of the wire format
def tgi_schema():
    p = os.environ.get("TGI_OPENAPI")
    if p:
        return json.load(open(p))
    return None


def clean(o):
    """OpenAPI 3.0 -> JSON schema: nullable, and drop examples/defaults."""
    if isinstance(o, list):
        return [clean(x) for x in o]
    if not isinstance(o, dict):
        return o
    d = {k: clean(v) for k, v in o.items() if k not in ("nullable", "example", "default", "format")}
    if isinstance(d.get("exclusiveMinimum"), bool):
        d.pop("exclusiveMinimum")
    return {"anyOf": [{"type": "null"}, d]} if o.get("nullable") else d


with c.step("TGI schema"):
    doc = tgi_schema()
    if doc is None:
        c.skip("TGI's own schema", "no TGI_OPENAPI")
    else:
        import jsonschema

        comp = clean(doc["components"])

        def val(name, ref, obj):
            errs = list(
                jsonschema.Draft202012Validator(
                    {"$ref": f"#/components/schemas/{ref}", "components": comp}
                ).iter_errors(obj)
            )
            c.ok(
                f"{name} validates as TGI {ref}", not errs, errs[:1] and (errs[0].message, list(errs[0].absolute_path))
            )

        q = {"inputs": P, "parameters": {"max_new_tokens": 3, "details": True, "decoder_input_details": True}}
        val("/generate with details", "GenerateResponse", json.loads(http("POST", BASE + "/generate", q)[2]))
        val(
            "/generate without details",
            "GenerateResponse",
            json.loads(http("POST", BASE + "/generate", {"inputs": P, "parameters": {"max_new_tokens": 3}})[2]),
        )
        st, h, tx = http("POST", BASE + "/generate_stream", {"inputs": P, "parameters": {"max_new_tokens": 3}})
        c.ok(
            "stream content-type is text/event-stream",
            h.get("content-type", "").startswith("text/event-stream"),
            h.get("content-type"),
        )
        for i, e in enumerate(x for x in tx.replace("\r\n", "\n").split("\n\n") if x.startswith("data:")):
            val(f"stream event {i}", "StreamResponse", json.loads(e[5:]))
        c.ok("no [DONE] in a TGI stream (this client parses every data: line as JSON)", "[DONE]" not in tx)
        val("422 body", "ErrorResponse", json.loads(http("POST", BASE + "/generate", {"inputs": ""})[2]))
        st, h, tx = http("GET", BASE + "/info")
        c.ok("/info is served", st == 200, st)
        if st == 200:
            val("/info", "Info", json.loads(tx))
        st, h, tx = http("POST", BASE + "/tokenize", {"inputs": P})
        c.warn("/tokenize is served (TGI form)", st == 200, st)
        if st == 200:
            val("/tokenize", "TokenizeResponse", json.loads(tx))
        c.ok("/health is 200", http("GET", BASE + "/health")[0] == 200)
c.done()
