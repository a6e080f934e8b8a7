#!/usr/bin/env python3
"""Acceptance of tools, formats and the Responses API with the official `openai` client.

usage: agent_openai.py BASE_URL
"""

import json

import openai
from _agent import CALLED, NEEDS, TASK, Animal, call, ended, is_animal, openai_tools
from _check import Checks, base_url, model_name
from openai.types.chat import ChatCompletion

BASE = base_url()
MODEL = model_name(BASE)
c = Checks(f"openai {openai.__version__} as an agent against {BASE} model={MODEL}")
cl = openai.OpenAI(base_url=BASE + "/v1", api_key="sk-anything", max_retries=0, timeout=300)
HI = [{"role": "user", "content": "Hi"}]
TOOLS = openai_tools()
ITEMS = [{"type": "function", **tool["function"]} for tool in TOOLS]  # as the Responses API names them
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "strict": True, "schema": Animal.model_json_schema()},
}


def chat(**fields):
    return cl.chat.completions.create(**{"model": MODEL, "messages": HI, "max_tokens": 200, "temperature": 0} | fields)


def joined(stream):
    """Return the calls, the text and the last finish_reason of a stream; check the order of its pieces."""
    calls, text, reason = {}, "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                if piece.index not in calls:
                    calls[piece.index] = [piece.id, piece.function.name, ""]
                    c.ok(
                        "the first piece names the call",
                        piece.id and piece.type == "function" and piece.function.name,
                        piece,
                    )
                calls[piece.index][2] += piece.function.arguments or ""
    return [calls[i] for i in range(len(calls))], text, reason


with c.step("formats"):
    for stream in (False, True):
        r = chat(messages=[NEEDS], response_format=SCHEMA, stream=stream)
        text = joined(r)[1] if stream else r.choices[0].message.content
        c.ok(f"response_format json_schema, stream={stream}", is_animal(text), text)
    text = chat(messages=[NEEDS], response_format={"type": "json_object"}).choices[0].message.content
    c.ok("response_format json_object", isinstance(json.loads(text), dict), text)
    r = cl.chat.completions.parse(model=MODEL, messages=[NEEDS], response_format=Animal, max_tokens=200)
    c.ok("parse gives an animal", isinstance(r.choices[0].message.parsed, Animal), r)
    with cl.chat.completions.stream(model=MODEL, messages=[NEEDS], response_format=Animal, max_tokens=200) as s:
        for _ in s:
            pass
        r = s.get_final_completion()
    c.ok("a stream parses to an animal", isinstance(r.choices[0].message.parsed, Animal), r)
    text = (
        cl.completions.create(
            model=MODEL, prompt="Hi", max_tokens=20, extra_body={"structured_outputs": {"choice": ["left", "right"]}}
        )
        .choices[0]
        .text
    )
    c.ok("completions with structured_outputs", text in ("left", "right"), text)
    try:
        cl.chat.completions.parse(model=MODEL, messages=[NEEDS], response_format=Animal, max_tokens=2)
        c.ok("a form cut by max_tokens is an error", False, "accepted")
    except openai.LengthFinishReasonError as e:
        c.ok("a form cut by max_tokens is an error", e.completion.usage.completion_tokens == 2, e)
with c.step("tools"):
    named = {"type": "function", "function": {"name": "population"}}
    for choice in ("required", named):
        raw = cl.chat.completions.with_raw_response.create(
            model=MODEL, messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0
        )
        ChatCompletion.model_validate(json.loads(raw.text() if callable(raw.text) else raw.text), strict=True)
        whole = raw.parse().choices[0]
        calls = whole.message.tool_calls
        c.ok(
            f"tool_choice {choice}", calls and whole.finish_reason == "tool_calls" and not whole.message.content, whole
        )
        c.ok(
            "the tool is the named one",
            choice == "required" or [k.function.name for k in calls] == ["population"],
            calls,
        )
        pieces, text, reason = joined(chat(tools=TOOLS, tool_choice=choice, stream=True))
        c.ok(
            "a stream calls the same",
            [p[1:] for p in pieces] == [[k.function.name, k.function.arguments] for k in calls],
            pieces,
        )
        c.ok("a stream ends with tool_calls and no text", (text, reason) == ("", "tool_calls"), (text, reason))
        for k in calls:
            call(k.function.name, k.function.arguments)
    r = chat(tools=TOOLS, tool_choice="none").choices[0]
    c.ok("tool_choice none", not r.message.tool_calls and r.message.content, r)
    CALLED.clear()
with c.step("chat loop"):
    for stream in (False, True):
        messages = [{"role": "user", "content": TASK}]
        for _ in range(5):
            if stream:
                with cl.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS, max_tokens=200) as s:
                    s.until_done()
                    m = s.get_final_completion().choices[0].message
            else:
                m = chat(messages=messages, tools=TOOLS).choices[0].message
            if not m.tool_calls:
                break
            messages += [m.model_dump(exclude_none=True)]
            messages += [
                {"role": "tool", "tool_call_id": k.id, "content": call(k.function.name, k.function.arguments)}
                for k in m.tool_calls
            ]
        ended(c, f"a loop of chats, stream={stream}", m.content)
with c.step("responses"):
    r = cl.responses.create(model=MODEL, input="Hi", instructions="Be short.", max_output_tokens=50, store=False)
    c.ok("a text", r.output_text and r.status in ("completed", "incomplete"), r)
    c.ok("usage adds up", r.usage.input_tokens + r.usage.output_tokens == r.usage.total_tokens, r.usage)
    r = cl.responses.create(model=MODEL, input="Hi", max_output_tokens=1, store=False)
    c.ok(
        "incomplete by max_output_tokens",
        (r.status, r.incomplete_details.reason) == ("incomplete", "max_output_tokens"),
        r,
    )
    r = cl.responses.parse(model=MODEL, input=[NEEDS], text_format=Animal, store=False, max_output_tokens=200)
    c.ok("parse gives an animal", isinstance(r.output_parsed, Animal), r)
    with cl.responses.stream(model=MODEL, input=[NEEDS], text_format=Animal, store=False, max_output_tokens=200) as s:
        events = list(s)
        r = s.get_final_response()
    c.ok("a stream parses to an animal", isinstance(r.output_parsed, Animal), r)
    c.ok(
        "sequence numbers count",
        [e.sequence_number for e in events if hasattr(e, "sequence_number")][:2] == [0, 1],
        events[:2],
    )
    c.ok("it begins and ends", (events[0].type, events[-1].type) == ("response.created", "response.completed"), events)
    r = cl.responses.create(
        model=MODEL, input="Hi", tools=ITEMS, tool_choice={"type": "function", "name": "population"}, store=False
    )
    c.ok("tool_choice of a function", [o.name for o in r.output if o.type == "function_call"] == ["population"], r)
with c.step("responses loop"):
    for stream in (False, True):
        items = [{"role": "user", "content": TASK}]
        for _ in range(5):
            asked = {"model": MODEL, "input": items, "tools": ITEMS, "store": False, "max_output_tokens": 200}
            if stream:
                with cl.responses.stream(**asked) as s:
                    s.until_done()
                    r = s.get_final_response()
            else:
                r = cl.responses.create(**asked)
            calls = [o for o in r.output if o.type == "function_call"]
            if not calls:
                break
            items += r.output  # as its guide says: with ids, and the reasoning if there is any
            items += [
                {"type": "function_call_output", "call_id": o.call_id, "output": call(o.name, o.arguments)}
                for o in calls
            ]
        ended(c, f"a loop of responses, stream={stream}", r.output_text)
with c.step("errors"):
    for name, run in (
        ("previous_response_id", lambda: cl.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")),
        ("tool_choice", lambda: chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nothing"}})),
        (
            "response_format",
            lambda: chat(
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
            ),
        ),
    ):
        try:
            run()
            c.ok(f"{name} is refused", False, "accepted")
        except openai.BadRequestError as e:
            c.ok(f"{name} is refused by name", (e.param or "").startswith(name), e)
c.done()
