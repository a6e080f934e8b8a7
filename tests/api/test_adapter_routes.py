"""Adapters over HTTP: by name in every dialect, listed, loaded and unloaded, through the official client too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from calls import connected, error
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import ask, done, official_client, texts

from app import create_app
from config import Config
from scheduling.pages import PagePool
from serving.adapters import AdapterStore
from tests.support import in_background
from tests.support.fakes import FakeModel, fake_engine

if TYPE_CHECKING:
    import openai


@dataclass(eq=False)
class Weights:
    """An adapter that lets the fake model write its name."""

    digest: str
    nbytes: int = 1 << 20
    rank: int = 8


class Writer(FakeModel):
    """Answers with the letters of the adapter's digest, without one with a, b, c, ..."""

    def output(self, seq: Any, count: int) -> Any:
        if seq.adapter_weights is None:
            return super().output(seq, count)
        digest = seq.adapter_weights.digest
        return ord(digest[len(seq.output_ids) % len(digest)])


READING = threading.Event()  # a slow adapter is read when it is set


def read(source: str) -> Weights:
    if "slow" in source:
        assert READING.wait(60)
    if "broken" in source:
        raise ValueError(f"{source}: the tensor h.0.c_attn is [1] but should be [2]")
    return Weights(Path(source).name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("xyz", "broken", "uvw"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "secret")
    return tmp_path / "adapters"


@pytest.fixture
def app(folder: Path) -> Iterator[Flask]:
    store = AdapterStore(read, 8 << 20, {"fake"})
    store.add("stu", "somewhere/stu")
    engine = replace(fake_engine(Writer(), pages=PagePool(400, 16)), adapters=store)
    yield from connected(create_app(Config(policy="dynamic", access_log=False, adapter_folder=str(folder))), engine)


@pytest.fixture
def sdk(app: Flask) -> Iterator[openai.OpenAI]:
    with official_client(app) as client:
        yield client


def test_the_official_client_completes_chats_and_lists_with_adapters(sdk: openai.OpenAI) -> None:
    import openai

    answer = sdk.completions.create(model="stu", prompt="hi", max_tokens=3)
    assert (answer.choices[0].text, answer.model) == ("stu", "stu")
    assert sdk.completions.create(model="fake", prompt="hi", max_tokens=3).choices[0].text == "abc"
    chunks = list(sdk.completions.create(model="stu", prompt="hi", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "stu"
    assert {chunk.model for chunk in chunks} == {"stu"}
    chat = sdk.chat.completions.create(model="stu", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert chat.choices[0].message.content == "stu"
    cards = [card.model_dump() for card in sdk.models.list()]
    assert [(card["id"], card["parent"]) for card in cards] == [("fake", None), ("stu", "fake")]
    assert sdk.models.retrieve("stu").model_dump()["parent"] == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.completions.create(model="another", prompt="hi")
    assert "'stu'" in str(caught.value)


def test_ollamas_clients_find_adapters_as_models(client: FlaskClient) -> None:
    cards = client.get("/api/tags").get_json()["models"]
    assert [(card["name"], card["details"]["parent_model"]) for card in cards] == [
        ("fake:latest", ""),
        ("stu:latest", "fake"),
    ]
    for name in ("stu", "stu:latest"):
        asked = {"model": name, "prompt": "hi", "stream": False, "options": {"num_predict": 3}}
        assert client.post("/api/generate", json=asked).get_json()["response"] == "stu"
        assert client.post("/api/show", json={"model": name}).get_json()["details"]["parent_model"] == "fake"


def test_the_other_dialects_name_an_adapter_as_their_clients_can(client: FlaskClient) -> None:
    body: dict[str, Any] = {"inputs": "hi", "parameters": {"max_new_tokens": 3, "adapter_id": "stu"}}
    assert client.post("/generate", json=body).json == {"generated_text": "stu"}
    message = {"model": "stu", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    answer = client.post("/v1/messages", json=message).get_json()
    assert (answer["content"][0]["text"], answer["model"]) == ("stu", "stu")
    answer = client.post("/inference", json={"prompt": "hi", "num_tokens": 3, "adapter": "stu"}).json
    assert answer is not None
    assert answer["completion"] == "histu"
    body["parameters"]["adapter_id"] = "another"
    refused = client.post("/generate", json=body)
    assert (refused.status_code, "'stu'" in refused.json["error"]) == (404, True)  # type: ignore[index]
    refused = client.post("/inference", json={"prompt": "hi", "num_tokens": 3, "adapter": "another"})
    assert (refused.status_code, refused.json["error"]["param"]) == (404, "adapter")  # type: ignore[index]


def text(client: FlaskClient, model: str) -> str:
    """Return three letters by this model or adapter."""
    return texts(done(client, model=model))[0]


def load(client: FlaskClient, name: str, path: Path | str, **more: Any) -> tuple[int, str]:
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})
    return answer.status_code, answer.text


def test_an_adapter_is_loaded_replaced_and_unloaded_as_in_vllm(client: FlaskClient, folder: Path) -> None:
    assert load(client, "one", folder / "xyz") == (200, "Success: LoRA adapter 'one' added successfully.")
    assert text(client, "one") == "xyz"
    assert load(client, "one", folder / "uvw")[0] == 400
    assert load(client, "one", folder / "uvw", load_inplace=True)[0] == 200
    assert text(client, "one") == "uvw"
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'one' removed successfully.")
    assert ask(client, model="one").status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 404


def test_only_allowed_folders_are_read_and_a_broken_adapter_disturbs_nobody(client: FlaskClient, folder: Path) -> None:
    assert load(client, "one", folder / ".." / "secret")[0] == 403
    assert load(client, "one", folder / "link")[0] == 403
    assert load(client, "one", "owner/name")[0] == 403
    assert load(client, "one", "a\0b")[0] == 403
    assert load(client, "one", folder / "missing")[0] == 404
    status, said = load(client, "one", folder / "broken")
    assert status == 400
    assert "h.0.c_attn is [1] but should be [2]" in said
    assert text(client, "stu") == "stu"


@pytest.mark.parametrize("name", ["fake", "a b"])
def test_a_name_that_no_adapter_may_have_is_what_is_wrong(client: FlaskClient, folder: Path, name: str) -> None:
    for path in (folder / "xyz", folder / "missing", "/"):
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        assert error(answer)["param"] == "lora_name"


def test_requests_go_on_while_an_adapter_is_read(client: FlaskClient, app: Flask, folder: Path) -> None:
    (folder / "slow").mkdir()
    READING.clear()
    with in_background(lambda: load(app.test_client(), "late", folder / "slow")) as results:
        assert [text(client, model) for model in ("fake", "stu")] == ["abc", "stu"]
        assert ask(client, model="late").status_code == 404
        READING.set()
    assert results[0][0] == 200
    assert text(client, "late") == "slo"


def test_without_a_folder_the_routes_are_off(fresh: Flask) -> None:
    client = fresh.test_client()
    assert load(client, "one", "/tmp")[0] == 403
    assert client.post("/inference", json={"prompt": "hi", "num_tokens": 1, "adapter": "x"}).status_code == 404


def test_adapters_are_shown_in_info_and_metrics(client: FlaskClient) -> None:
    shown = client.get("/info").json["adapters"]  # type: ignore[index]
    assert shown == [{"id": "stu", "rank": 8, "bytes": 1 << 20, "in_memory": True}]
    lines = client.get("/metrics").text.splitlines()
    assert {"eb_adapters 1.0", "eb_adapter_bytes 1.048576e+06", "eb_adapter_loads_total 1.0"} <= set(lines)


def test_answers_of_an_adapter_and_of_the_model_share_no_pages(client: FlaskClient) -> None:
    prompt = "x" * 100
    hits = [
        client.post("/inference", json={"prompt": prompt, "num_tokens": 1, **more}).json["cached_tokens"]  # type: ignore[index]
        for more in ({}, {"adapter": "stu"}, {}, {"adapter": "stu"})
    ]
    assert hits == [0, 0, 96, 96]
