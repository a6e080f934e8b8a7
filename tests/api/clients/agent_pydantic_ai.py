#!/usr/bin/env python3
"""Acceptance with `pydantic-ai`, by chats and by the Responses API: tools, streams, and each way to a typed answer.

usage: agent_pydantic_ai.py BASE_URL
"""

import asyncio
from importlib.metadata import version

from _agent import FUNCTIONS, NEEDS, TASK, Animal, ended
from _check import begin
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL, c = begin(f"pydantic-ai {version('pydantic-ai-slim')}")


async def streamed(agent: Agent) -> str:
    async with agent.run_stream(TASK) as run:
        return await run.get_output()


async def accept(kind: type) -> None:
    name = kind.__name__
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE + "/v1", api_key="sk-anything"))
    short = {"max_tokens": 200}
    agent = Agent(model, instructions="Be short.", tools=[*FUNCTIONS.values()], model_settings=short, retries=0)
    ended(c, f"{name} in a loop", (await agent.run(TASK)).output)
    ended(c, f"{name} in streams", await streamed(agent))
    for form in (ToolOutput(Animal), NativeOutput(Animal)):
        found = (await Agent(model, output_type=form, model_settings=short, retries=0).run(NEEDS["content"])).output
        c.ok(f"{name} with {type(form).__name__}", isinstance(found, Animal), found)


async def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        with c.step(kind.__name__):
            await accept(kind)


asyncio.run(main())
c.done()
