#!/usr/bin/env python3
"""Acceptance with the official `ollama` client: chats, texts, streams, tools, formats, and what it lists.

usage: agent_ollama.py BASE_URL
"""

from importlib.metadata import version

import ollama
from _agent import CITIES, FUNCTIONS, NEEDS, TASK, Animal, call, ended, is_animal, openai_tools
from _check import begin

BASE, MODEL, c = begin(f"ollama {version('ollama')}")
cl = ollama.Client(host=BASE, timeout=300)
HI = [{"role": "user", "content": "Hi"}]
SHORT = {"temperature": 0, "num_predict": 200, "seed": 1}

with c.step("list, show and version"):
    models = [found.model for found in cl.list().models]
    c.ok("list has the model", MODEL in [name.removesuffix(":latest") for name in models], models)
    shown = cl.show(MODEL)
    c.ok("show says that it can complete and call tools", {"completion", "tools"} <= {*shown.capabilities}, shown)
    c.ok("show has details", shown.details and shown.details.family, shown)
with c.step("chat"):
    r = cl.chat(MODEL, HI, options=SHORT)
    c.ok("a text", r.message.role == "assistant" and r.message.content, r)
    c.ok("done", r.done and r.done_reason in ("stop", "length"), r)
    c.ok("counts", r.prompt_eval_count > 0 and 0 < r.eval_count <= 200 and r.total_duration > 0, r)
    parts = list(cl.chat(MODEL, HI, options=SHORT, stream=True))
    c.ok("a stream has the same text", "".join(p.message.content or "" for p in parts) == r.message.content, parts)
    c.ok("only its last line is done", [p.done for p in parts] == [False] * (len(parts) - 1) + [True])
    c.ok("its last line counts", parts[-1].eval_count == r.eval_count, parts[-1])
with c.step("generate"):
    r = cl.generate(MODEL, "Hi", options=SHORT, system="Be short.")
    parts = list(cl.generate(MODEL, "Hi", options=SHORT, system="Be short.", stream=True))
    c.ok("a text", r.response and r.done, r)
    c.ok("a stream has the same text", "".join(p.response for p in parts) == r.response, parts)
    short = cl.generate(MODEL, "Hi", options={"num_predict": 1}, raw=True)
    c.ok("num_predict", (short.done_reason, short.eval_count) == ("length", 1), short)
    r = cl.generate(MODEL, "Hi", options=SHORT, format=Animal.model_json_schema())
    c.ok("generate with a format", is_animal(r.response), r)
with c.step("formats"):
    for stream in (False, True):
        r = cl.chat(MODEL, [NEEDS], format=Animal.model_json_schema(), options=SHORT, stream=stream)
        text = "".join(p.message.content for p in r) if stream else r.message.content
        c.ok(f"format of a schema, stream={stream}", is_animal(text), text)
    text = cl.chat(MODEL, [NEEDS], format="json", options=SHORT).message.content
    c.ok("format json", text.lstrip().startswith("{"), text)
with c.step("loop"):
    for stream, tools in ((False, openai_tools()), (True, openai_tools()), (True, [*FUNCTIONS.values()])):
        messages = [{"role": "user", "content": TASK}]
        for _ in range(5):
            r = cl.chat(MODEL, messages, tools=tools, options=SHORT, stream=stream)
            parts = list(r) if stream else [r]
            calls = [t.function for p in parts for t in p.message.tool_calls or []]
            text = "".join(p.message.content or "" for p in parts)
            if not calls:
                break
            messages += [p.message for p in parts if p.message.tool_calls]
            messages += [{"role": "tool", "content": call(f.name, f.arguments), "tool_name": f.name} for f in calls]
        name = f"a loop, stream={stream}, of {type(tools[0]).__name__}s"
        ended(c, name, text, CITIES if type(tools[0]) is dict else None)  # the client drops the enum of a function
with c.step("errors"):
    for stream in (False, True):
        try:
            list(cl.chat("another", HI, stream=stream))
            c.ok(f"another model, stream={stream}", False, "accepted")
        except ollama.ResponseError as e:
            c.ok(f"another model, stream={stream}", e.status_code == 404 and isinstance(e.error, str), e)
c.done()
