#!/usr/bin/env python3
"""Acceptance with the official `anthropic` client: messages, streams, tools, formats, and its tool runner.

usage: agent_anthropic.py BASE_URL
"""

import anthropic
from _agent import CALLED, FUNCTIONS, NEEDS, TASK, Animal, call, ended, parameters
from _check import begin

BASE, MODEL, c = begin(f"anthropic {anthropic.__version__}")
cl = anthropic.Anthropic(base_url=BASE, api_key="sk-anything", max_retries=0, timeout=300)
TOOLS = [{"name": n, "description": f.__doc__, "input_schema": parameters(n)} for n, f in FUNCTIONS.items()]
ASKED = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}  # which the API has and this client not
HI = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def tokens(usage):
    return usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


with c.step("message"):
    m = cl.messages.create(**ASKED, system="Be short.", messages=HI)
    c.ok("a text", [b.type for b in m.content] == ["text"] and m.content[0].text, m)
    c.ok("message fields", (m.type, m.role, m.model) == ("message", "assistant", MODEL) and m.id.startswith("msg_"), m)
    count = cl.messages.count_tokens(model=MODEL, system="Be short.", messages=HI)
    c.ok("count_tokens counts what a message reads", count.input_tokens == tokens(m.usage)[0], count)
    first = cl.messages.create(**{**ASKED, "max_tokens": 1}, messages=HI)
    c.ok("stop_reason max_tokens", (first.stop_reason, first.usage.output_tokens) == ("max_tokens", 1), first)
    word = m.content[0].text[5:9]
    cut = cl.messages.create(**ASKED, system="Be short.", messages=HI, stop_sequences=[word])
    c.ok("stop_sequences", (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word), cut)
with c.step("stream"):
    with cl.messages.stream(**ASKED, system="Be short.", messages=HI) as s:
        text = "".join(s.text_stream)
        last = s.get_final_message()
    c.ok("a stream has the same text", text == m.content[0].text, text)
    ends = [(x.stop_reason, tokens(x.usage)) for x in (last, m)]
    c.ok("a stream ends as the message does", ends[0] == ends[1], ends)
with c.step("tools"):
    for choice in ({"type": "any"}, {"type": "tool", "name": "population"}):
        with cl.messages.stream(**ASKED, tools=TOOLS, tool_choice=choice, messages=HI) as s:
            last = s.get_final_message()
        uses = [b for b in last.content if b.type == "tool_use"]
        c.ok(f"tool_choice {choice['type']} in a stream", uses and last.stop_reason == "tool_use", last)
        c.ok("the tool is the named one", all(u.name == choice.get("name", u.name) for u in uses), uses)
        for use in uses:
            call(use.name, use.input)
    last = cl.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "none"}, messages=HI)
    c.ok("tool_choice none", all(b.type == "text" for b in last.content), last)
    CALLED.clear()
with c.step("loop"):
    messages = [{"role": "user", "content": TASK}]
    for _ in range(5):
        m = cl.messages.create(**ASKED, tools=TOOLS, messages=messages)
        messages += [{"role": "assistant", "content": m.content}]
        uses = [b for b in m.content if b.type == "tool_use"]
        if m.stop_reason != "tool_use":
            break
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": call(u.name, u.input)} for u in uses]
        messages += [{"role": "user", "content": results}]
    ended(c, "a loop by hand", "".join(b.text for b in m.content if b.type == "text"))
with c.step("tool runner"):
    for stream in (False, True):
        tools = [anthropic.beta_tool(f) for f in FUNCTIONS.values()]
        asked = [{"role": "user", "content": TASK}]
        runner = cl.beta.messages.tool_runner(**ASKED, tools=tools, messages=asked, max_iterations=5, stream=stream)
        last = runner.until_done()
        ended(c, f"the tool runner, stream={stream}", "".join(b.text for b in last.content if b.type == "text"))
with c.step("format"):
    parsed = cl.messages.parse(**ASKED, messages=[NEEDS], output_format=Animal)
    c.ok("parse gives an animal", isinstance(parsed.parsed_output, Animal), parsed)
with c.step("errors"):
    bad = [
        ("no max_tokens", {"max_tokens": None, "messages": HI}, anthropic.BadRequestError, "invalid_request_error"),
        ("another model", {"model": "another", "messages": HI}, anthropic.NotFoundError, "not_found_error"),
        ("no messages", {"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ]
    for name, change, kind, type_ in bad:
        try:
            cl.messages.create(**{**ASKED, **change})
            c.ok(name, False, "accepted")
        except anthropic.APIStatusError as e:
            body = e.body or {}
            c.ok(f"{name}: the error is one of anthropic's", isinstance(e, kind) and body["type"] == "error", e)
            c.ok(f"{name}: {type_}", body["error"]["type"] == type_ and body["error"]["message"], body)
    raw = cl.messages.with_raw_response.create(**ASKED, messages=HI)
    c.ok("request-id header", raw.headers.get("request-id"), dict(raw.headers))
c.done()
