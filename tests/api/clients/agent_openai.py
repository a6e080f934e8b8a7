#!/usr/bin/env python3
"""Acceptance of tools, formats and the Responses API with the official `openai` client.

usage: agent_openai.py BASE_URL
"""

import json

import openai
from _agent import CALLED, NEEDS, TASK, Animal, call, chat_loop, ended, is_animal, openai_tools
from _check import begin
from openai.types.chat import ChatCompletion

BASE, MODEL, c = begin(f"openai {openai.__version__} as an agent")
cl = openai.OpenAI(base_url=BASE + "/v1", api_key="sk-anything", max_retries=0, timeout=300)
chats = cl.chat.completions
HI = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 0}
DESCRIBE = HI | {"messages": [NEEDS]}
RESPOND = {"model": MODEL, "store": False, "max_output_tokens": 200, "temperature": 0}
TOOLS = openai_tools()
ITEMS = [{"type": "function", **tool["function"]} for tool in TOOLS]  # as the Responses API names them


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}


def joined(stream):
    """Return the calls, the text and the last finish_reason of a stream; check that each call begins with its name."""
    calls, text, reason = {}, "", None
    for choice in (choice for chunk in stream for choice in chunk.choices):
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or []:
            if piece.index not in calls:
                calls[piece.index] = [piece.function.name, ""]
                c.ok("a call begins with id, type and name", piece.id and piece.type and piece.function.name, piece)
            calls[piece.index][1] += piece.function.arguments or ""
    return [calls[i] for i in range(len(calls))], text, reason


with c.step("formats"):
    asked = DESCRIBE | {"response_format": form(Animal.model_json_schema())}
    text = chats.create(**asked).choices[0].message.content
    c.ok("response_format json_schema", is_animal(text), text)
    c.ok("a stream has the same text", joined(chats.create(**asked, stream=True))[1] == text)
    text = chats.create(**DESCRIBE, response_format={"type": "json_object"}).choices[0].message.content
    c.ok("response_format json_object", isinstance(json.loads(text), dict), text)
    r = chats.parse(**DESCRIBE, response_format=Animal)
    c.ok("parse gives an animal", isinstance(r.choices[0].message.parsed, Animal), r)
    with chats.stream(**DESCRIBE, response_format=Animal) as s:
        r = s.until_done().get_final_completion()
    c.ok("a stream parses to an animal", isinstance(r.choices[0].message.parsed, Animal), r)
    either = {"structured_outputs": {"choice": ["left", "right"]}}
    text = cl.completions.create(model=MODEL, prompt="Hi", extra_body=either).choices[0].text
    c.ok("completions with structured_outputs", text in ("left", "right"), text)
with c.step("tools"):
    for choice in ("required", {"type": "function", "function": {"name": "population"}}):
        asked = HI | {"tools": TOOLS, "tool_choice": choice}
        raw = chats.with_raw_response.create(**asked)
        ChatCompletion.model_validate(json.loads(raw.text() if callable(raw.text) else raw.text), strict=True)
        whole = raw.parse().choices[0]
        calls = [[k.function.name, k.function.arguments] for k in whole.message.tool_calls]
        c.ok(f"tool_choice {choice}", calls and whole.finish_reason == "tool_calls", whole)
        c.ok("content is null", whole.message.content is None, whole)
        c.ok("the tool is the named one", choice == "required" or calls[0][0] == "population", calls)
        c.ok("a stream calls the same", joined(chats.create(**asked, stream=True)) == (calls, "", "tool_calls"), calls)
        for name, arguments in calls:
            call(name, arguments)
    r = chats.create(**HI, tools=TOOLS, tool_choice="none").choices[0]
    c.ok("tool_choice none", not r.message.tool_calls and r.message.content, r)
    CALLED.clear()
with c.step("chat loop"):

    def streamed(messages):
        with chats.stream(**HI | {"messages": messages}, tools=TOOLS) as s:
            return s.until_done().get_final_completion().choices[0].message

    ended(c, "a loop", chat_loop(lambda m: chats.create(**HI | {"messages": m}, tools=TOOLS).choices[0].message))
    ended(c, "a loop of streams", chat_loop(streamed))
with c.step("responses"):
    r = cl.responses.create(**RESPOND, input="Hi", instructions="Be short.")
    c.ok("a text", r.output_text and r.status in ("completed", "incomplete"), r)
    r = cl.responses.create(**RESPOND | {"max_output_tokens": 1}, input="Hi")
    c.ok("incomplete", r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens", r)
    r = cl.responses.parse(**RESPOND, input=[NEEDS], text_format=Animal)
    c.ok("parse gives an animal", isinstance(r.output_parsed, Animal), r)
    text = {"format": {"type": "json_schema", "name": "animal", "schema": Animal.model_json_schema()}}
    events = [*cl.responses.create(**RESPOND, input=[NEEDS], text=text, stream=True)]
    c.ok("they begin and end", (events[0].type, events[-1].type) == ("response.created", "response.completed"), events)
    with cl.responses.stream(**RESPOND, input=[NEEDS], text_format=Animal) as s:
        r = s.until_done().get_final_response()
    c.ok("a stream parses to an animal", isinstance(r.output_parsed, Animal), r)
    r = cl.responses.create(**RESPOND, input="Hi", tools=ITEMS, tool_choice={"type": "function", "name": "population"})
    c.ok("tool_choice of a function", [o.name for o in r.output if o.type == "function_call"] == ["population"], r)
with c.step("responses loop"):
    for stream in (False, True):
        items = [{"role": "user", "content": TASK}]
        for _ in range(5):
            if stream:
                with cl.responses.stream(**RESPOND, input=items, tools=ITEMS) as s:
                    r = s.until_done().get_final_response()
            else:
                r = cl.responses.create(**RESPOND, input=items, tools=ITEMS)
            results = [(o.call_id, call(o.name, o.arguments)) for o in r.output if o.type == "function_call"]
            if not results:
                break
            items += r.output  # as its guide says: with ids, and the reasoning if there is any
            items += [{"type": "function_call_output", "call_id": id_, "output": text} for id_, text in results]
        ended(c, f"a loop of responses, stream={stream}", r.output_text)
with c.step("errors"):
    unknown = {"type": "function", "function": {"name": "nothing"}}
    for name, run in (
        ("previous_response_id", lambda: cl.responses.create(**RESPOND, input="Hi", previous_response_id="resp_1")),
        ("tool_choice", lambda: chats.create(**HI, tools=TOOLS, tool_choice=unknown)),
        ("response_format", lambda: chats.create(**HI, response_format=form({"type": "nothing"}))),
    ):
        try:
            run()
            c.ok(f"{name} is refused", False, "accepted")
        except openai.BadRequestError as e:
            c.ok(f"{name} is refused by name", (e.param or "").startswith(name), e)
c.done()
