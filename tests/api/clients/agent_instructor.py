#!/usr/bin/env python3
"""Acceptance with `instructor`: an answer of a type by each mode that it has for OpenAI's API, and through anthropic's.

usage: agent_instructor.py BASE_URL
"""

from importlib.metadata import version

import anthropic
import instructor
import openai
from _agent import NEEDS, Animal
from _check import begin

BASE, MODEL, c = begin(f"instructor {version('instructor')}")
cl = openai.OpenAI(base_url=BASE + "/v1", api_key="sk-anything", max_retries=0, timeout=300)
claude = anthropic.Anthropic(base_url=BASE, api_key="sk-anything", max_retries=0, timeout=300)
Mode = instructor.Mode

for name, client in (
    *((m.value, instructor.from_openai(cl, mode=m)) for m in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)),
    ("anthropic_tools", instructor.from_anthropic(claude, mode=Mode.ANTHROPIC_TOOLS)),
):
    with c.step(name):
        asked = {"model": MODEL, "messages": [NEEDS], "max_tokens": 200, "max_retries": 0}
        c.ok(f"{name} gives an animal", isinstance(client.create(response_model=Animal, **asked), Animal))
        parts = list(client.create_partial(response_model=Animal, **asked))
        c.ok(f"{name} streams its fields", parts and Animal.model_validate(parts[-1].model_dump()), parts)
c.done()
