#!/usr/bin/env python3
"""Acceptance with `litellm` through each dialect that it can speak: OpenAI's, vLLM's, Anthropic's and Ollama's.

usage: agent_litellm.py BASE_URL
"""

import json
import os
from functools import partial
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it asks GitHub for prices
import litellm
from _agent import CITIES, NEEDS, chat_loop, ended, openai_tools, parameters
from _check import begin

BASE, MODEL, c = begin(f"litellm {version('litellm')}")
litellm.suppress_debug_info = True
# Without definitions: it breaks references to them ("/$defs/Home") where it speaks Anthropic's dialect.
FORM = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": parameters("temperature")}}

for provider, base in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", ""), ("ollama_chat", "")):
    asked = {"model": f"{provider}/{MODEL}", "api_base": BASE + base, "api_key": "sk-anything", "max_tokens": 200}
    asked |= {"num_retries": 0, "timeout": 300}

    def complete(messages, stream=False, asked=asked):
        r = litellm.completion(**asked, messages=messages, tools=openai_tools(), stream=stream)
        return (litellm.stream_chunk_builder([*r], messages=messages) if stream else r).choices[0].message

    for stream in (False, True):
        with c.step(f"{provider}, stream={stream}"):
            ended(c, f"{provider} in a loop, stream={stream}", chat_loop(partial(complete, stream=stream)))
    with c.step(f"{provider} form"):
        text = litellm.completion(**asked, messages=[NEEDS], response_format=FORM).choices[0].message.content
        found = json.loads(text)
        c.ok(f"{provider} with a response_format", found["city"] in CITIES and type(found["days"]) is int, text)
with c.step("responses"):
    r = litellm.responses(
        model=f"openai/{MODEL}", input="Hi", api_base=BASE + "/v1", api_key="sk-anything", max_output_tokens=20
    )
    c.ok("responses", json.loads(r.model_dump_json())["output"], r)
c.done()
