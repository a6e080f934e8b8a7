"""A server with a model and adapters of it, from its settings to its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flask.testing import FlaskClient
from safetensors.torch import save_file

from app import connect, create_app, load_engine
from config import Config
from tests.support.checkpoints import write_checkpoint

ASKED = {"prompt": "the quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def write(folder: Path, seed: int, out: int = 384) -> Path:
    """Write an adapter of the checkpoint's queries, keys and values."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_"
        tensors[f"{name}A.weight"] = torch.randn(8, 128, generator=generator)
        tensors[f"{name}B.weight"] = torch.randn(out, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_checkpoint(folder / "tiny")
    for seed, name in enumerate(("one", "two", "later")):
        write(folder / "adapters" / name, seed)
    write(folder / "adapters" / "foreign", 9, out=300)
    return folder


def config(folder: Path, **settings: Any) -> Config:
    return Config(
        policy="dynamic",
        model=str(folder / "tiny"),
        compute_threads=1,
        kv_memory=64 << 20,
        access_log=False,
        **settings,
    )


def start(settings: Config) -> Any:
    app = create_app(settings)
    engine = load_engine(settings)
    connect(app.extensions["service"], engine)
    return app


@pytest.fixture(scope="module")
def clients(folder: Path) -> Iterator[tuple[FlaskClient, FlaskClient]]:
    """Return clients of a server without adapters and of one with two, in room for three."""
    adapters = folder / "adapters"
    size = 2 * (8 * 128 + 384 * 8) * 4
    settings = {
        "adapter": f"one={adapters}/one,two={adapters}/two",
        "adapter_folder": str(adapters),
        "adapter_memory": 3 * size,
    }
    apps = [start(config(folder)), start(config(folder, **settings))]
    yield apps[0].test_client(), apps[1].test_client()
    for app in apps:
        app.extensions["service"].engine.manager.stop()


def text(client: FlaskClient, **more: Any) -> str:
    answer = client.post("/v1/completions", json=ASKED | more)
    assert answer.status_code == 200, answer.text
    result: str = answer.json["choices"][0]["text"]  # type: ignore[index]
    return result


def test_answers_beside_adapters_are_those_of_a_server_without_any(clients: tuple[FlaskClient, FlaskClient]) -> None:
    plain, adapted = clients
    names = [None, "one", "two"] * 4
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        model = {"model": names[i]} if names[i] else {}
        found[i] = text(adapted.application.test_client(), prompt=f"{i % 4} {ASKED['prompt']}", **model)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(0, 12, 3):
        assert found[i] == text(plain, prompt=f"{i % 4} {ASKED['prompt']}")
    assert len({text(adapted), text(adapted, model="one"), text(adapted, model="two")}) == 3


def test_an_adapter_of_another_model_is_refused_by_its_tensor_and_the_rest_goes_on(
    clients: tuple[FlaskClient, FlaskClient], folder: Path
) -> None:
    _, client = clients
    before = text(client, model="one")
    asked = {"lora_name": "bad", "lora_path": str(folder / "adapters" / "foreign")}
    refused = client.post("/v1/load_lora_adapter", json=asked)
    assert refused.status_code == 400
    assert "h.0.attn.c_attn.lora_B.weight is [300, 8] but should be [384, 8]" in refused.json["error"]["message"]  # type: ignore[index]
    assert text(client, model="one") == before
    asked = {"lora_name": "later", "lora_path": str(folder / "adapters" / "later")}
    assert client.post("/v1/load_lora_adapter", json=asked).status_code == 200
    assert text(client, model="later") not in (before, text(client))


def load(client: FlaskClient, path: Path) -> str:
    """Return the refusal of an adapter."""
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "linked", "lora_path": str(path)})
    assert answer.status_code == 400
    error = answer.json["error"]  # type: ignore[index]
    assert error["param"] == "lora_path"
    return str(error["message"])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_a_link_to_outside_is_not_read(
    clients: tuple[FlaskClient, FlaskClient], folder: Path, name: str
) -> None:
    outside = write(folder / f"outside {name}", 3)
    linked = write(folder / "adapters" / f"linked {name}", 3)
    (linked / name).unlink()
    (linked / name).symlink_to(outside / name)
    assert f"{name} is a link" in load(clients[1], linked)
    (linked / name).unlink()
    (linked / name).symlink_to(folder / "adapters" / "later" / name)  # within the folder it may be one
    asked = {"lora_name": name, "lora_path": str(linked)}
    assert clients[1].post("/v1/load_lora_adapter", json=asked).status_code == 200


def test_refusals_of_an_adapter_do_not_name_the_folders_of_the_server(
    clients: tuple[FlaskClient, FlaskClient], folder: Path
) -> None:
    broken = write(folder / "adapters" / "broken", 4)
    for text in ("{", "[]", '{"peft_type": "LORA", "bias": "all"}', None):
        (broken / "adapter_config.json").unlink()
        if text is not None:
            (broken / "adapter_config.json").write_text(text)
        assert str(folder) not in load(clients[1], broken)
    broken = write(folder / "adapters" / "no tensors", 4)
    for data in (b"", b"\xff" * 100):
        (broken / "adapter_model.safetensors").write_bytes(data)
        assert str(folder) not in load(clients[1], broken)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapter": "one=/nowhere/at/all"}, "has no adapter_config.json"),
        ({"adapter": "tiny={folder}/adapters/one"}, "is the name of the model"),
        ({"adapter": "one={folder}/adapters/foreign"}, "should be [384, 8]"),
        ({"adapter": "one={folder}/adapters/one", "adapter_memory": 100}, "--adapter-memory"),
    ],
)
def test_an_adapter_that_cannot_be_served_ends_the_start_with_its_reason(
    settings: dict[str, Any], said: str, folder: Path
) -> None:
    settings["adapter"] = settings["adapter"].format(folder=folder)
    with pytest.raises(ValueError, match="--adapter") as caught:
        load_engine(config(folder, **settings))
    assert said in str(caught.value)


def test_a_mock_model_has_no_weights_for_an_adapter_to_change() -> None:
    with pytest.raises(ValueError, match="--adapter"):
        load_engine(Config(policy="dynamic", model="mock:llm-mock", adapter="a=b", access_log=False))
