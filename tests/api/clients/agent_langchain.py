#!/usr/bin/env python3
"""Acceptance with `langchain-openai`: the three methods of structured output, bound tools, and langchain's agent.

usage: agent_langchain.py BASE_URL
"""

from importlib.metadata import version

from _agent import CALLED, FUNCTIONS, NEEDS, TASK, Animal, call, ended
from _check import begin
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

BASE, MODEL, c = begin(f"langchain-openai {version('langchain-openai')}")
TOOLS = [*FUNCTIONS.values()]


def chat_model(**fields):
    asked = {"temperature": 0, "max_tokens": 200, "max_retries": 0, "timeout": 300} | fields
    return ChatOpenAI(model=MODEL, base_url=BASE + "/v1", api_key="sk-anything", **asked)


llm = chat_model()
for method in ("json_schema", "function_calling"):
    with c.step(method):
        chain = llm.with_structured_output(Animal, method=method)
        c.ok(f"{method} gives an animal", isinstance(chain.invoke([NEEDS]), Animal))
        parts = list(chain.stream([NEEDS]))
        c.ok(f"{method} in a stream", parts and isinstance(parts[-1], Animal), parts)
with c.step("json_mode"):
    found = llm.with_structured_output(None, method="json_mode").invoke([NEEDS])
    c.ok("json_mode gives an object", isinstance(found, dict), found)
with c.step("bind_tools"):
    for choice, names in (("any", FUNCTIONS), ("population", ["population"])):
        bound = llm.bind_tools(TOOLS, tool_choice=choice)
        whole = bound.invoke(TASK)
        calls = whole.tool_calls
        c.ok(f"tool_choice {choice}", calls and {k["name"] for k in calls} <= {*names}, whole)
        c.ok("no call is invalid", not whole.invalid_tool_calls, whole.invalid_tool_calls)
        for k in calls:
            call(k["name"], k["args"])
        chunks = list(bound.stream(TASK))
        total = sum(chunks[1:], chunks[0])
        c.ok("the pieces of a stream add up to calls", total.tool_calls and not total.invalid_tool_calls, total)
    CALLED.clear()
with c.step("agent"):
    models = {"chats": llm, "responses": chat_model(use_responses_api=True), "streams": chat_model(streaming=True)}
    for name, model in models.items():
        agent = create_agent(model, TOOLS, system_prompt="Be short.")
        result = agent.invoke({"messages": [{"role": "user", "content": TASK}]}, {"recursion_limit": 12})
        ended(c, f"an agent by {name}", result["messages"][-1].text)
    agent = create_agent(llm, [], response_format=Animal)
    result = agent.invoke({"messages": [NEEDS]}, {"recursion_limit": 12})
    c.ok("an agent with a response format", isinstance(result.get("structured_response"), Animal), result)
with c.step("embeddings"):
    embedder = OpenAIEmbeddings(
        model=MODEL, base_url=BASE + "/v1", api_key="sk-anything", check_embedding_ctx_length=False
    )  # whose check would download the tokenizer of a model of OpenAI
    one, other = embedder.embed_documents(["a cat", "a dog"])
    c.ok("embeddings differ and have one width", len(one) == len(other) and one != other)
    c.ok("a query is embedded as a document is", embedder.embed_query("a cat") == one)
c.done()
