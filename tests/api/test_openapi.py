"""The document of the API: it is valid, it has every route, and every answer is as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from calls import connected, service
from flask import Flask
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel, Field

from api.hooks.admission import OPEN
from api.http.openapi import Operation, document
from api.schemas import fields as f
from app import create_app
from config import Config
from tests.support import points
from tests.support.fakes import fake_engine


@pytest.fixture(scope="module")
def app() -> Iterator[Flask]:
    yield from connected(create_app(Config(policy="dynamic")), fake_engine())


def described(app: Flask, key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    result: dict[str, Any] = app.test_client().get("/openapi.json", headers=headers).get_json()
    return result


def operations(described: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }


def validate(document: dict[str, Any]) -> None:
    from openapi_spec_validator import validate as check  # half a second in every worker, were it above

    check(document)


def test_the_document_is_openapi_and_has_every_route(app: Flask) -> None:
    found = described(app)
    validate(found)
    routes = {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in rule.methods or ()
        if method not in ("HEAD", "OPTIONS")
    }
    assert routes == set(operations(found))
    ids = [operation["operationId"] for operation in operations(found).values()]
    assert len(ids) == len(set(ids))


def test_routes_that_generate_say_how_they_refuse(app: Flask) -> None:
    found = operations(described(app))
    for path, codes in (("/inference", {"400", "500"}), ("/generate", {"422", "424"})):
        assert {"413", "415", "429", "503", "504", *codes} <= set(found["post", path]["responses"])
        assert "Retry-After" in found["post", path]["responses"]["429"]["headers"]
        assert "X-Ignored-Params" in found["post", path]["responses"]["200"]["headers"]
    assert {op.path for op in service(app).operations if op.generates} >= {
        "/inference", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/generate_stream", "/",
    }  # fmt: skip


def test_the_root_takes_a_request_of_tgi_or_any_other_body(app: Flask) -> None:
    root = operations(described(app))["post", "/"]
    assert "requestBody" not in root
    assert set(root["responses"]["200"]["content"]) == {"application/json", "text/plain", "text/event-stream"}


def test_with_a_key_every_route_but_the_open_ones_asks_for_it() -> None:
    found = described(create_app(Config(api_key="k")), key="k")
    validate(found)
    for (_, path), operation in operations(found).items():
        assert ("security" in operation) == (path not in OPEN), path
        assert ("401" in operation["responses"]) == (path not in OPEN), path
    assert "security" not in str(described(create_app(Config())))


def schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from schemas_in(inner)


def test_generators_of_clients_understand_every_schema(app: Flask) -> None:
    found = described(app)
    schemas = [*schemas_in(found)]
    assert all("items" in schema for schema in schemas if "array" in schema.get("type", ()))
    titles = [schema["title"] for schema in schemas_in(found["components"]) if isinstance(schema.get("title"), str)]
    assert len(titles) == len(set(titles))
    assert not any(isinstance(schema.get("default"), dict) for schema in schemas if "anyOf" in schema)
    for name, schema in found["components"]["schemas"].items():
        assert "anyOf" not in schema, name  # it would stand for the fields
        assert name.lower() not in schema.get("properties", {}), name


class Inner(BaseModel):
    few: int = Field(1, ge=1, lt=9)


class Sent(BaseModel):
    num_tokens: f.Length
    ge: float | None = Field(None, gt=0.5, description="a number")
    inner: Inner | None = None
    word: str = "x"


def test_a_body_is_documented_in_the_words_of_json_schema_and_null_is_absence() -> None:
    operation = Operation("post", "/x", "does it", "tag", body=Sent, example={"num_tokens": 1})
    found = document([operation], "1", frozenset(), keyed=False, limits={"context": 78})
    validate(found)
    fields = found["components"]["schemas"]["Sent"]["properties"]
    assert (fields["num_tokens"]["minimum"], fields["num_tokens"]["maximum"]) == (1, 77)
    assert {"exclusiveMinimum": 0.5, "type": "number"} in fields["ge"]["anyOf"]
    for name in ("ge", "inner", "word"):
        assert {"type": "null"} in fields[name]["anyOf"]
    few = found["components"]["schemas"]["Inner"]["properties"]["few"]["anyOf"][0]
    assert (few["minimum"], few["exclusiveMaximum"]) == (1, 9)
    assert found["paths"]["/x"]["post"]["operationId"] == "post_x"


def test_limits_of_tokens_are_those_of_the_model_and_there_are_none_while_it_loads() -> None:
    engine = fake_engine(context=77)
    served = described(create_app(Config(), engine))["components"]["schemas"]
    loading = described(create_app(Config()))["components"]["schemas"]
    engine.manager.stop()
    for schemas, most_tokens, most_id in ((served, 76, 256), (loading, None, None)):
        kinds = schemas["InferenceRequest"]["properties"]["num_tokens"]
        assert kinds.get("maximum") == most_tokens
        assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"].get("maximum") == most_id


def test_the_page_shows_every_route_and_needs_no_other_host(app: Flask) -> None:
    reply = app.test_client().get("/docs")
    assert reply.mimetype == "text/html"
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", reply.text)
    assert "<script" not in reply.text
    for path in described(app)["paths"]:
        assert f"<code>{path}</code>" in reply.text
    assert "num_tokens" in reply.text


@pytest.mark.parametrize("data", points(1, "positive", "negative"))
def test_every_route_answers_as_documented_whatever_is_sent(app: Flask, data: str) -> None:
    import schemathesis  # not in every worker of a run
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_wsgi("/openapi.json", app)
    schema = schema.exclude(method="POST", path="/load")  # each would start up to 400 requests of its own
    schema = schema.exclude(path=["/events", "/policy", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
    found = [operation.ok() for operation in schema.get_all_operations()]
    assert len(found) >= 20
    generating = {(op.method, op.path) for op in service(app).operations if op.generates}
    for operation in found:
        if data == "negative" and not operation.body:
            continue  # whatever is sent is as documented
        # A prompt that is valid JSON may still be longer than the model's context.
        unchecked = [positive_data_acceptance] if (operation.method, operation.path) in generating else []
        answers_as_documented(operation.as_strategy(schemathesis.GenerationMode(data)), unchecked)


def answers_as_documented(cases: Any, unchecked: list[Any]) -> None:
    """Send what schemathesis draws, and hold the answers to all its checks but those."""

    @given(case=cases)
    @settings(
        phases=[Phase.generate], max_examples=settings.default.max_examples // 2, suppress_health_check=[*HealthCheck]
    )
    def answers(case: Any) -> None:
        case.call_and_validate(excluded_checks=unchecked)

    answers()


def test_the_page_lists_required_fields_first() -> None:
    page = create_app(Config()).test_client().get("/docs").text
    fields = page.partition("/inference</code>")[2].partition("</details>")[0]
    assert fields.index("<code>num_tokens</code> *") < fields.index("<code>user</code>")
    assert "<code>prompt</code> *" not in fields.partition("<code>user</code>")[2]
