#!/usr/bin/env python3
"""Acceptance with Hugging Face's `text-generation` client 0.7.0, the client of TGI: that it reads every answer, stream and error.

It POSTs to the base URL itself, with a `stream` flag in the body, and wants a JSON *array* back when it does not stream.
What fields mean and which values are refused is tested without a client: tests/api/test_tgi.py.

usage: accept_tgi.py BASE_URL
"""

import asyncio
import json
import re
import warnings

warnings.simplefilter("ignore")
import text_generation
from text_generation import AsyncClient, Client
from text_generation import errors as E
from text_generation.types import FinishReason, Grammar, GrammarType, Response

warnings.simplefilter("ignore")
from _check import begin, http

BASE, MODEL, c = begin(f"text-generation {text_generation.__version__}")
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


def joined(tokens):
    return "".join(t.text for t in tokens if not t.special)


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
    whole = cl.generate(P, max_new_tokens=10, decoder_input_details=True)
    d = whole.details
    c.ok("the end is told", d.generated_tokens == 10 or d.finish_reason == FinishReason.EndOfSequenceToken, d)
    c.ok("details.tokens has one entry a token", len(d.tokens) == d.generated_tokens, d)
    texts = joined(d.tokens), whole.generated_text
    c.ok("token texts join to generated_text", texts[0] == texts[1] or "\ufffd" in "".join(texts), texts)
    c.ok("prefill texts join to the prompt", "".join(t.text for t in d.prefill) == P, d.prefill)
    c.ok("greedy is repeatable", cl.generate(P, max_new_tokens=10).generated_text == whole.generated_text)
with c.step("sampling"):
    fields = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
    a, b = (cl.generate(P, max_new_tokens=10, **fields) for _ in range(2))
    c.ok("same seed, same text, and it is told", (a.generated_text, a.details.seed) == (b.generated_text, 5), a)
    top = cl.generate(P, max_new_tokens=4, top_n_tokens=3).details
    c.ok("top_n_tokens", len(top.top_tokens) == len(top.tokens) and min(map(len, top.top_tokens)) >= 3, top)
with c.step("generate_stream"):
    for way, client in (("/", cl), ("/generate_stream", Client(BASE + "/generate_stream", timeout=300))):
        ev = list(client.generate_stream(P, max_new_tokens=10))
        c.ok(f"{way}: same tokens as generate", [e.token.id for e in ev] == [t.id for t in d.tokens], ev)
        c.ok(f"{way}: same text as generate", ev[-1].generated_text == whole.generated_text, ev[-1])
        c.ok(f"{way}: details at the end", ev[-1].details.generated_tokens == len(ev) and not ev[0].details, ev)
    ev = list(cl.generate_stream(P, max_new_tokens=4, top_n_tokens=2))
    c.ok("top_n_tokens in the stream", all(e.top_tokens and len(e.top_tokens) >= 2 for e in ev), ev)
with c.step("stop"):
    text = whole.generated_text
    stop = next(text[i : i + 3] for i in range(1, len(text) - 2) if "\ufffd" not in text[i : i + 3])
    upto = text[: text.find(stop)] + stop
    r = cl.generate(P, max_new_tokens=24, stop_sequences=[stop])
    ev = list(cl.generate_stream(P, max_new_tokens=24, stop_sequences=[stop]))
    for found, end in ((r.generated_text, r.details), (ev[-1].generated_text, ev[-1].details)):
        c.ok("a stop ends the text and stays in it", found.startswith(upto), (stop, found))
        c.ok("it is the reason", end.finish_reason == FinishReason.StopSequence, end)
with c.step("/generate"):
    body = {"inputs": P, "parameters": {"max_new_tokens": 10, "details": True}, "stream": False}
    g = Response(**json.loads(http("POST", BASE + "/generate", body)[2]))
    c.ok("an object that says the same", g.generated_text == whole.generated_text, g)
with c.step("errors"):
    long = {"max_new_tokens": 10_000}
    expect("a bad value", E.ValidationError, lambda: cl.generate("test", **long))
    expect("a bad value in a stream is an HTTP error", E.ValidationError, lambda: cl.generate_stream("test", **long))
    expect("a long prompt", E.ValidationError, lambda: cl.generate("hello " * 4000, max_new_tokens=5))
    expect("an unknown path", E.NotFoundError, lambda: Client(BASE + "/fake/model").generate("test"))


async def many():
    ac = AsyncClient(BASE, timeout=600)
    texts = await asyncio.gather(*[ac.generate(f"number {i}", max_new_tokens=9) for i in range(12)])
    c.ok("12 at once from AsyncClient", [t.details.generated_tokens > 0 for t in texts] == [True] * 12, texts)


with c.step("concurrency"):
    asyncio.run(many())
c.done()
