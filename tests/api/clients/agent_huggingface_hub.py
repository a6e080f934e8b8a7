#!/usr/bin/env python3
"""Acceptance with huggingface_hub's `InferenceClient`: chats with tools and a form, and TGI's grammar.

usage: agent_huggingface_hub.py BASE_URL
"""

import huggingface_hub
from _agent import NEEDS, TASK, Animal, call, ended, is_animal, openai_tools
from _check import begin

BASE, MODEL, c = begin(f"huggingface_hub {huggingface_hub.__version__}")
cl = huggingface_hub.InferenceClient(BASE, timeout=300)
TOOLS = openai_tools()
SCHEMA = Animal.model_json_schema()

with c.step("form"):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    # Without a model, as users of a base URL call it.
    text = cl.chat_completion([NEEDS], response_format=form, max_tokens=200).choices[0].message.content
    c.ok("response_format", is_animal(text), text)
with c.step("grammar"):
    for kind, value, right in (
        ("json", SCHEMA, is_animal),
        ("regex", "[0-9]{3}-[0-9]{2}", lambda text: len(text) == 6 and text[3] == "-"),
    ):
        asked = {"grammar": {"type": kind, "value": value}, "max_new_tokens": 200, "details": True}
        whole = cl.text_generation("Describe an animal.", **asked).generated_text
        c.ok(f"grammar {kind}", right(whole), whole)
        parts = list(cl.text_generation("Describe an animal.", **asked, stream=True))
        c.ok(f"grammar {kind} in a stream", right("".join(p.token.text for p in parts if not p.token.special)), parts)
with c.step("loop"):
    for stream in (False, True):
        messages = [{"role": "user", "content": TASK}]
        for _ in range(5):
            r = cl.chat_completion(
                messages, model=MODEL, tools=TOOLS, tool_choice="auto", max_tokens=200, stream=stream
            )
            if stream:
                deltas = [chunk.choices[0].delta for chunk in r if chunk.choices]
                pieces = [piece for d in deltas for piece in d.tool_calls or []]
                text = "".join(d.content or "" for d in deltas)
                calls = [
                    (first.id, first.function.name, "".join(p.function.arguments or "" for p in pieces if p.index == first.index))
                    for first in pieces if first.id
                ]  # fmt: skip
            else:
                m = r.choices[0].message
                text, calls = m.content, [(k.id, k.function.name, k.function.arguments) for k in m.tool_calls or []]
            if not calls:
                break
            named = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
            messages += [{"role": "assistant", "content": None, "tool_calls": named}]
            messages += [{"role": "tool", "tool_call_id": i, "content": call(n, a)} for i, n, a in calls]
        ended(c, f"a loop, stream={stream}", text)
c.done()
