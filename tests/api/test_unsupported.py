"""Fields that change the answer are refused where they are not supported, unless their value changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from dialects import EVERY, Dialect, post, refused
from flask.testing import FlaskClient
from openai_calls import USER

from api.dialects.native import InferenceRequest
from api.schemas import unsupported
from api.schemas.forms import Formed
from api.schemas.openai import ChatRequest, CompletionRequest
from api.schemas.responses import ResponsesRequest
from api.schemas.tgi import GenerateParameters
from tests.support.fakes import FakeModel

SCHEMAS: dict[str, Any] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest,
    "/": GenerateParameters, "/inference": InferenceRequest,
}  # fmt: skip
flat = pytest.mark.parametrize("dialect", [d for d in EVERY if d.path in SCHEMAS], ids=lambda dialect: dialect.path)
# What every dialect refuses: with a value of another server's documentation.
REFUSED: dict[str, Any] = {
    "guided_json": {"type": "object"}, "guided_regex": "[ab]", "guided_choice": ["a"], "guided_grammar": "root ::= 'a'",
    "guided_whitespace_pattern": " ", "guided_decoding_backend": "outlines", "structured_outputs": {"choice": ["a"]},
    "response_format": {"type": "json_object"}, "json_schema": {}, "regex": "[ab]", "ebnf": "root ::= 'a'",
    "format": {"type": "object"}, "output_format": {"type": "json_schema", "schema": {}},
    "output_config": {"format": {"type": "json_schema", "schema": {}}}, "extra_body": {"guided_choice": ["a"]},
    "grammar": "root ::= 'a'", "use_beam_search": True, "length_penalty": 2, "early_stopping": True,
    "bad_words": ["a"], "allowed_token_ids": [1], "logits_processors": ["x"], "top_n_sigma": 1.5, "mirostat": 2,
    "dry_multiplier": 0.8, "xtc_probability": 0.5, "repeat_penalty": 1.3, "dynatemp_range": 0.5, "n_predict": 5,
    "stop_regex": "a+", "web_search_options": {}, "continue_final_message": True, "add_generation_prompt": False,
    "chat_template": "x", "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "x"}],
    "mm_processor_kwargs": {"crops": 4}, "tools": [{"type": "function"}], "tool_choice": "required",
    "functions": [{"name": "f"}], "function_call": {"name": "f"}, "modalities": ["text", "audio"],
    "audio": {"voice": "ash"}, "prediction": {"type": "content"}, "reasoning_effort": "high", "verbosity": "low",
    "include_reasoning": False, "lora_path": "x", "return_hidden_states": True, "suffix": "x", "prompt_embeds": "x",
}  # fmt: skip


# What a dialect takes if it has the field; the values of all others are wrong there, too.
TAKEN = {"add_generation_prompt", "chat_template_kwargs", "reasoning_effort", *Formed.model_fields}


@flat
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    client: FlaskClient, model: FakeModel, dialect: Dialect
) -> None:
    for name in REFUSED.keys() - (TAKEN & SCHEMAS[dialect.path].model_fields.keys()):
        message = refused(post(client, dialect, {name: REFUSED[name]}, limit=1), dialect)
        assert message.removeprefix("parameters.").startswith(name), message
    assert model.plans == 0


@flat
def test_a_value_that_changes_nothing_is_taken_and_not_called_ignored(client: FlaskClient, dialect: Dialect) -> None:
    schema = SCHEMAS[dialect.path]
    for name in schema.unsupported.keys() - schema.model_fields:
        for value in (None, *schema.unsupported[name]):
            reply = post(client, dialect, {name: value}, limit=1)
            assert reply.status_code == 200, (name, value, reply.text)
            assert "X-Ignored-Params" not in reply.headers


def test_zero_is_not_false_and_no_list_is_taken_for_another() -> None:
    assert unsupported.changes_nothing(1.0, (1,))
    assert unsupported.changes_nothing(None, ())
    for value, neutral in ((0, (False,)), (False, (0,)), (True, (1,)), ([0], ([],)), ("0", (0,))):
        assert not unsupported.changes_nothing(value, neutral)


def test_a_field_of_one_dialect_is_refused_where_another_lacks_it(client: FlaskClient) -> None:
    for path, name, value in (
        ("/inference", "repetition_penalty", 1.2), ("/inference", "n", 2), ("/inference", "logit_bias", {"1": 5}),
        ("/inference", "skip_special_tokens", True), ("/", "ignore_eos", True), ("/", "min_p", 0.1),
        ("/v1/completions", "typical_p", 0.5), ("/v1/completions", "stop_sequences", ["a"]),
        ("/v1/completions", "max_completion_tokens", 5), ("/v1/chat/completions", "prompt_logprobs", 1),
        ("/v1/chat/completions", "echo", True), ("/v1/chat/completions", "best_of", 2), ("/v1/completions", "best_of", 2),
    ):  # fmt: skip
        (dialect,) = (dialect for dialect in EVERY if dialect.path == path)
        assert name in refused(post(client, dialect, {name: value}, limit=1), dialect)


def test_a_constraint_beside_tgis_parameters_is_refused_too(client: FlaskClient) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        reply = client.post(path, json={"inputs": "hi", "grammar": {"type": "json"}})
        assert (reply.status_code, "grammar" in reply.get_json()["error"]) == (422, True)


@pytest.mark.parametrize("field", [{"prefix": True}, {"partial": True}, {"function_call": {"name": "f"}},
                                   {"tool_calls": [{"type": "function"}]}])  # fmt: skip
def test_a_field_of_a_message_that_would_vanish_from_a_plain_prompt_is_refused(
    client: FlaskClient, field: dict[str, Any]
) -> None:
    messages = [USER, {"role": "assistant", "content": None, **field}]
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = client.post(path, json={"messages": messages})
        assert (reply.status_code, reply.get_json()["error"]["param"]) == (400, "messages")


def test_tokenize_refuses_what_would_give_other_ids(client: FlaskClient) -> None:
    for name, value in (("continue_final_message", True), ("tools", [{}]), ("chat_template", "x")):
        reply = client.post("/tokenize", json={"messages": [USER], name: value})
        assert (reply.status_code, reply.get_json()["error"]["param"]) == (400, name)


def test_the_document_and_its_page_name_what_is_refused(client: FlaskClient) -> None:
    schemas = client.get("/openapi.json").get_json()["components"]["schemas"]
    assert schemas["ChatRequest"]["x-unsupported"]["function_call"] == ["none", "auto"]
    assert "guided_json" in schemas["GenerateParameters"]["x-unsupported"]
    assert "typical_p" not in schemas["GenerateParameters"]["x-unsupported"]
    assert "<code>guided_json</code>" in client.get("/docs").text
