#!/usr/bin/env python3
"""Acceptance with `dspy`: a typed signature by response_format, and its agent by native tool calls.

usage: agent_dspy.py BASE_URL
"""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it asks GitHub for prices
import dspy
from _agent import FUNCTIONS, TASK, Animal, ended
from _check import begin
from dspy import lm15

BASE, MODEL, c = begin(f"dspy {dspy.__version__}")
door = lm15.AccessPolicy(provider="batching", base_url=BASE + "/v1", env_keys=("BATCHING_API_KEY",))
able = lm15.ModelSupport(function_calling=True, response_schema=True)
lm15.register_provider(lm15.ProviderDefinition.chat(door, compat=lm15.OpenAIChatCompat()), supports=able)
lm = dspy.LM(f"batching/{MODEL}", api_key="sk-anything", max_tokens=300, cache=False, num_retries=0)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())

with c.step("typed"):
    typed = dspy.Predict(dspy.Signature({"request": dspy.InputField(), "animal": (Animal, dspy.OutputField())}))
    c.ok("a typed answer", isinstance(typed(request="A cat.").animal, Animal))
with c.step("loop"):
    react = dspy.ReActV2("question -> answer", tools=[*FUNCTIONS.values()], max_iters=5)
    found = react(question=TASK)
    ended(c, "ReActV2", f"answer: {found.answer}")
    c.ok("ReActV2 submits its answer", "submit" in found.termination_reason, found)
c.done()
