#!/usr/bin/env python3
"""Acceptance with the official `openai` Python client (tested with 3.51.0): that it reads every answer, stream and error.

What fields mean and which values are refused is tested without a client: tests/api/test_completions.py and its neighbors.

usage: accept_openai.py BASE_URL
"""

import asyncio
import json

import openai
from _check import begin
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

BASE, MODEL, c = begin(f"openai {openai.__version__}")
cl = OpenAI(base_url=BASE + "/v1", api_key="sk-anything", max_retries=0, timeout=300)
P = "The quick brown fox"
P2 = "Once upon a time there was a"
GREEDY = {"max_tokens": 6, "temperature": 0}


def comp(**kw):
    return cl.completions.create(**{"model": MODEL, "prompt": P} | kw)


def text(**kw):
    return comp(**kw).choices[0].text


def streamed(**kw):
    return [*comp(stream=True, **kw)]


def joined(chunks):
    return "".join(x.choices[0].text for x in chunks if x.choices)


def strict(kind, raw):
    """Return an answer after checking each of its fields, of which the client itself checks none."""
    kind.model_validate(json.loads(raw.text() if callable(raw.text) else raw.text), strict=True)
    return raw.parse()


def expect(name, exc, fn, **fields):
    try:
        r = fn()
        if hasattr(r, "__next__"):
            list(r)
        c.ok(name, False, "accepted, no error raised")
    except exc as e:
        o = e.response.json()["error"]
        c.ok(name, o["message"] and o["type"] and {"param", "code"} <= o.keys(), o)
        c.ok(f"{name}: {fields}", fields.items() <= o.items(), o)


with c.step("models"):
    c.ok("the served model is listed", MODEL in [m.id for m in cl.models.list()])
    c.ok("models.retrieve", cl.models.retrieve(MODEL).object == "model")
    expect("models.retrieve of an unknown model", openai.NotFoundError, lambda: cl.models.retrieve("no-such-model"))
with c.step("completion"):
    base = strict(Completion, cl.completions.with_raw_response.create(model=MODEL, prompt=P, **GREEDY))
    u, choice = base.usage, base.choices[0]
    c.ok("model and id", base.model == MODEL and base.id and comp(max_tokens=1).id != base.id, base)
    c.ok("usage adds up", u.prompt_tokens > 0 and u.prompt_tokens + u.completion_tokens == u.total_tokens, u)
    c.ok("the end is told", choice.finish_reason == "stop" or u.completion_tokens == 6, base)
    c.ok("greedy is repeatable", text(**GREEDY) == choice.text)
    c.warn("x-request-id response header", base._request_id is not None)
    a, b = choice.text, text(prompt=P2, **GREEDY)
    r = comp(n=2, prompt=[P, P2], **GREEDY)
    c.ok("two prompts of two choices come in order", [x.text for x in r.choices] == [a, a, b, b], r)
    r = comp(prompt=[104, 105], echo=True, **GREEDY)
    c.ok("a prompt of ids", r.usage.prompt_tokens == 2 and len(r.choices[0].text) > 2, r)
with c.step("logprobs"):
    lp = comp(logprobs=3, echo=True, **GREEDY).choices[0].logprobs
    pairs = [*zip(lp.token_logprobs, lp.top_logprobs, strict=True)]
    c.ok("the first token has no score", pairs[0] == (None, None), lp)
    c.ok("each is among its alternatives with the same float (lm-eval)", all(v in t.values() for v, t in pairs[1:]), lp)
with c.step("stream"):
    *chunks, last = streamed(logprobs=3, echo=True, stream_options={"include_usage": True}, **GREEDY)
    c.ok("it joins to the whole text", joined(chunks) == P + choice.text, joined(chunks))
    c.ok("its tokens too", [t for x in chunks for t in x.choices[0].logprobs.tokens] == lp.tokens, chunks)
    c.ok("the usage comes last and alone", last.choices == [] and last.usage.completion_tokens == 6, last)
    c.ok("no other chunk has it", all(x.usage is None and x.id == last.id for x in chunks), chunks)
with c.step("chat"):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **GREEDY}
    m = strict(ChatCompletion, cl.chat.completions.with_raw_response.create(**asked)).choices[0].message
    c.ok("an answer of the assistant", m.role == "assistant" and m.content, m)
    deltas = [x.choices[0].delta.content for x in cl.chat.completions.create(**asked, stream=True)]
    c.ok("a stream joins to it", "".join(d or "" for d in deltas) == m.content, deltas)
with c.step("embeddings"):
    ways = [cl.embeddings.create(model=MODEL, input=["hi", "abc"], **w) for w in ({}, {"encoding_format": "float"})]
    c.ok("numbers by either way", ways[0].data[1].embedding == ways[1].data[1].embedding, ways)
    c.ok("usage and numbers", ways[0].usage.prompt_tokens > 1 and ways[0].data[0].embedding, ways)
with c.step("extras"):  # sent by vLLM, sglang, guidellm, lm-eval and LangChain
    own = {"ignore_eos": True, "repetition_penalty": 1.0, "top_k": -1, "use_beam_search": False, "unknown_field_xyz": 1}
    common = {"presence_penalty": 0, "logit_bias": {}, "user": "u", "best_of": 1, "suffix": None}
    c.ok("extras of other servers are accepted", comp(**GREEDY, **common, extra_body=own).usage.completion_tokens == 6)
    x = streamed(max_tokens=3, stream_options={"include_usage": True, "continuous_usage_stats": True})
    c.ok("stream_options.continuous_usage_stats is accepted (guidellm)", x[-1].usage is not None)
with c.step("errors"):
    B = openai.BadRequestError
    unknown = {"param": "model", "code": "model_not_found"}
    expect("an unknown model", openai.NotFoundError, lambda: comp(model="no-such-model"), **unknown)
    expect("a bad value", B, lambda: comp(temperature=-1), param="temperature")
    expect("a bad value in a stream is an HTTP error, not an event", B, lambda: comp(stream=True, temperature=-1))
    expect("a long prompt", B, lambda: comp(prompt="hello " * 3072), code="context_length_exceeded")
    form = {"guided_regex": "(a"}
    expect("a form", B, lambda: comp(max_tokens=3, extra_body=form), param="guided_regex")
    expect("a form", B, lambda: cl.chat.completions.create(**asked, extra_body=form), param="guided_regex")


async def leaves():
    async with AsyncOpenAI(base_url=BASE + "/v1", api_key="x", max_retries=0, timeout=600) as ac:
        s = await ac.completions.create(model=MODEL, prompt=P, max_tokens=200, stream=True)
        async for _ in s:
            break
        await s.close()
        r = await ac.completions.create(model=MODEL, prompt=P, max_tokens=2)
        c.ok("the server serves on after a client hung up mid-stream", r.usage.completion_tokens >= 1, r)


with c.step("hanging up"):
    asyncio.run(leaves())
c.done()
