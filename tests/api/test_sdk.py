"""The official clients of OpenAI and of TGI against the application in this process, without a server.

tests/api/test_clients.py runs their acceptance scripts against a real one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import requests
from flask import Flask
from openai_calls import official_client
from requests.adapters import BaseAdapter
from urllib3 import HTTPResponse

from app import connect, create_app
from config import Config
from tests.support.fakes import fake_engine

if TYPE_CHECKING:  # the clients take as long to load as all tests of this file take, in every worker of a run
    import openai
    import text_generation


@pytest.fixture(scope="module")
def app() -> Iterator[Flask]:
    app = create_app(Config(policy="dynamic", access_log=False))
    engine = fake_engine()
    connect(app.extensions["service"], engine)
    yield app
    engine.manager.stop()


@pytest.fixture
def sdk(app: Flask) -> Iterator[openai.OpenAI]:
    with official_client(app) as client:
        yield client


def test_openai_gets_a_completion_with_its_usage_and_scores(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="fake", prompt="hi", max_tokens=3, logprobs=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 3)


def test_openai_reads_a_stream_and_its_usage(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.completions.create(
            model="fake", prompt="hi", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abcde"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_openai_chats_at_once_and_in_a_stream(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    whole = sdk.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == "abcd"
    deltas = [chunk.choices[0].delta.content for chunk in sdk.chat.completions.create(**asked, stream=True)]
    assert "".join(delta or "" for delta in deltas) == "abcd"


def test_openai_lists_the_model_and_does_not_find_another(sdk: openai.OpenAI) -> None:
    import openai

    assert [model.id for model in sdk.models.list()] == ["fake"]
    assert sdk.models.retrieve("fake").object == "model"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("another")


def test_openai_raises_its_own_error_that_names_the_field(sdk: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="fake", prompt="hi", max_tokens=3, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="fake", prompt="x" * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_openai_is_told_of_a_form_that_cannot_be_enforced(sdk: openai.OpenAI) -> None:
    import openai

    for create, asked in (
        (sdk.completions.create, {"prompt": "hi"}),
        (sdk.chat.completions.create, {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="fake", max_tokens=3, extra_body={"guided_regex": "(a"}, **asked)  # type: ignore[operator]
        assert caught.value.param == "guided_regex"


class Wsgi(BaseAdapter):
    """Lets `requests` ask an application in this process."""

    def __init__(self, app: Flask) -> None:
        super().__init__()
        self.client = app.test_client()

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        assert request.url is not None
        answer = self.client.open(
            urlsplit(request.url).path, method=request.method, data=request.body, headers=list(request.headers.items())
        )
        response = requests.Response()
        response.status_code = answer.status_code
        response.headers.update(answer.headers)
        response.raw = HTTPResponse(io.BytesIO(answer.data), preload_content=False)
        return response

    def close(self) -> None:
        """Hold nothing that needs to be closed."""


old_pydantic = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")


@pytest.fixture
def tgi(app: Flask, monkeypatch: pytest.MonkeyPatch) -> text_generation.Client:
    import text_generation

    session = requests.Session()
    session.mount("http://testserver", Wsgi(app))
    monkeypatch.setattr("text_generation.client.requests", session)
    return text_generation.Client("http://testserver")


@old_pydantic
def test_tgis_client_gets_a_text_with_its_details(tgi: text_generation.Client) -> None:
    answer = tgi.generate("hi", max_new_tokens=3, decoder_input_details=True)
    assert answer.generated_text == "abc"
    assert (answer.details.finish_reason, answer.details.generated_tokens) == ("length", 3)
    assert [token.text for token in answer.details.prefill] == ["h", "i"]


@old_pydantic
def test_tgis_client_reads_a_stream_to_its_end(tgi: text_generation.Client) -> None:
    chunks = list(tgi.generate_stream("hi", max_new_tokens=4))
    assert "".join(chunk.token.text for chunk in chunks) == "abcd"
    assert chunks[-1].generated_text == "abcd"
    assert chunks[-1].details is not None


@old_pydantic
def test_tgis_client_raises_its_own_error(tgi: text_generation.Client) -> None:
    from text_generation.errors import ValidationError

    with pytest.raises(ValidationError):
        tgi.generate("x" * 5000, max_new_tokens=3)
    with pytest.raises(ValidationError):
        list(tgi.generate_stream("x" * 5000, max_new_tokens=3))


def test_an_error_of_the_server_is_json_that_both_clients_read(app: Flask) -> None:
    for path, status in (("/v1/completions", 400), ("/generate", 422)):
        answer = app.test_client().post(path, json={})
        assert answer.status_code == status
        assert "error" in json.loads(answer.data)
