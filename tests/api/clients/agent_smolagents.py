#!/usr/bin/env python3
"""Acceptance with `smolagents`: an agent that calls tools, and one that writes code as JSON.

usage: agent_smolagents.py BASE_URL
"""

from importlib.metadata import version

import smolagents
from _agent import CALLED, CITIES, FUNCTIONS, TASK, ended
from _check import begin

BASE, MODEL, c = begin(f"smolagents {version('smolagents')}")
model = smolagents.OpenAIServerModel(MODEL, api_base=BASE + "/v1", api_key="sk-anything", max_tokens=200)


@smolagents.tool
def clock() -> str:
    """Return the time. A mock model chooses the first name of the alphabet, so not final_answer."""
    CALLED.append(("clock", CITIES[0], 0))
    return "12 o'clock"


TOOLS = [*(smolagents.tool(f) for f in FUNCTIONS.values()), clock]

for stream in (False, True):
    with c.step(f"stream={stream}"):
        agent = smolagents.ToolCallingAgent(TOOLS, model, max_steps=2, verbosity_level=0, stream_outputs=stream)
        ended(c, f"a tool-calling agent, stream={stream}", str(agent.run(TASK)))
        bad = [s.error for s in agent.memory.steps if getattr(s, "error", None)]
        c.ok("no step of it is an error but the last", all("max steps" in str(e) for e in bad), bad)
with c.step("code"):
    agent = smolagents.CodeAgent(TOOLS, model, max_steps=1, verbosity_level=0, use_structured_outputs_internally=True)
    agent.run(TASK)
    step = next(s for s in agent.memory.steps if isinstance(s, smolagents.ActionStep))
    c.ok("a code agent gets its code in the form", step.code_action is not None, step)
c.done()
