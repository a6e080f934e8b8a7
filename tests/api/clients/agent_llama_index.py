#!/usr/bin/env python3
"""Acceptance with `llama-index`: typed answers, tool calls, and its agent, whose chats are streams.

usage: agent_llama_index.py BASE_URL
"""

import asyncio
from importlib.metadata import version

from _agent import FUNCTIONS, NEEDS, TASK, Animal, ended
from _check import begin
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

BASE, MODEL, c = begin(f"llama-index {version('llama-index-core')}")
llm = OpenAILike(
    model=MODEL, api_base=BASE + "/v1", api_key="sk-anything", is_chat_model=True, is_function_calling_model=True,
    max_tokens=200, max_retries=0, timeout=300, context_window=1024,
)  # fmt: skip
TOOLS = [FunctionTool.from_defaults(f) for f in FUNCTIONS.values()]


async def run_agent():
    agent = FunctionAgent(tools=TOOLS, llm=llm, system_prompt="Be short.")
    return str(await agent.run(TASK, max_iterations=5))


with c.step("typed"):
    found = llm.as_structured_llm(Animal).chat([ChatMessage(**NEEDS)]).raw
    c.ok("a structured LLM gives an animal", isinstance(found, Animal), found)
with c.step("call"):
    answer = llm.predict_and_call(TOOLS, TASK)
    ended(c, "predict_and_call", str(answer))
with c.step("agent"):
    ended(c, "an agent", asyncio.run(run_agent()))
c.done()
