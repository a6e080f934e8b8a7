#!/usr/bin/env python3
"""Acceptance with `openai-agents`, which speaks the Responses API or chats, in streams or not.

usage: agent_openai_agents.py BASE_URL
"""

import asyncio
from importlib.metadata import version

import agents
from _agent import FUNCTIONS, NEEDS, TASK, Animal, ended
from _check import begin
from openai import AsyncOpenAI

BASE, MODEL, c = begin(f"openai-agents {version('openai-agents')}")
cl = AsyncOpenAI(base_url=BASE + "/v1", api_key="sk-anything", max_retries=0, timeout=300)
agents.set_tracing_disabled(True)
SHORT = agents.ModelSettings(max_tokens=200, store=False)


async def accept(kind):
    """Run an agent with two tools, at once and in a stream, and one that answers in a form, alone and handed off to."""
    name, model = kind.__name__, kind(model=MODEL, openai_client=cl)
    tools = [agents.function_tool(f) for f in FUNCTIONS.values()]
    agent = agents.Agent("helper", instructions="Be short.", model=model, tools=tools, model_settings=SHORT)
    ended(c, f"{name} in a loop", (await agents.Runner.run(agent, TASK, max_turns=5)).final_output)
    run = agents.Runner.run_streamed(agent, TASK, max_turns=5)
    events = [event async for event in run.stream_events()]
    ended(c, f"{name} in streams", run.final_output)
    told = {getattr(e, "name", "") for e in events}
    c.ok(f"{name} streams its call and its text", {"tool_called", "tool_output"} <= told, told)
    typed = agents.Agent("biologist", model=model, output_type=Animal, model_settings=SHORT)
    found = (await agents.Runner.run(typed, NEEDS["content"])).final_output
    c.ok(f"{name} with an output type", isinstance(found, Animal), found)
    chief = agents.Agent("chief", model=model, handoffs=[typed], model_settings=SHORT)
    found = (await agents.Runner.run(chief, NEEDS["content"], max_turns=5)).final_output
    c.ok(f"{name} hands off", isinstance(found, Animal), found)


async def accept_both():
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        with c.step(kind.__name__):
            await accept(kind)


asyncio.run(accept_both())
c.done()
