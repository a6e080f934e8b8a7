"""A server with a model and adapters of it, from its settings to its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import engine_of, error
from flask.testing import FlaskClient
from safetensors.torch import save_file
from werkzeug.test import TestResponse

from app import create_app, load_engine
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
    tiny = {"model": str(folder / "tiny"), "compute_threads": 1, "kv_memory": 64 << 20, "access_log": False}
    return Config(policy="dynamic", **tiny, **settings)  # type: ignore[arg-type]


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
    both = config(folder), config(folder, **settings)
    apps = [create_app(one, load_engine(one)) for one in both]
    yield apps[0].test_client(), apps[1].test_client()
    for app in apps:
        engine_of(app).manager.stop()


def text(client: FlaskClient, **more: Any) -> str:
    answer = client.post("/v1/completions", json=ASKED | more)
    assert answer.status_code == 200, answer.text
    result: str = answer.json["choices"][0]["text"]  # type: ignore[index]
    return result


def load(client: FlaskClient, name: str, path: Path) -> TestResponse:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def refused(client: FlaskClient, path: Path) -> str:
    refusal = error(load(client, "linked", path))
    assert refusal["param"] == "lora_path"
    return str(refusal["message"])


def test_answers_beside_adapters_are_those_of_a_server_without_any(clients: tuple[FlaskClient, FlaskClient]) -> None:
    plain, adapted = clients
    names = [None, "one", "two"] * 4

    def ask(i: int) -> str:
        model = {"model": names[i]} if names[i] else {}
        return text(adapted.application.test_client(), prompt=f"{i % 4} {ASKED['prompt']}", **model)

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(12)))
    for i in range(0, 12, 3):
        assert found[i] == text(plain, prompt=f"{i % 4} {ASKED['prompt']}")
    assert len({text(adapted), text(adapted, model="one"), text(adapted, model="two")}) == 3


def test_an_adapter_of_another_model_is_refused_by_its_tensor_and_the_rest_goes_on(
    clients: tuple[FlaskClient, FlaskClient], folder: Path
) -> None:
    _, client = clients
    before = text(client, model="one")
    refusal = refused(client, folder / "adapters" / "foreign")
    assert "h.0.attn.c_attn.lora_B.weight is [300, 8] but should be [384, 8]" in refusal
    assert text(client, model="one") == before
    assert load(client, "later", folder / "adapters" / "later").status_code == 200
    assert text(client, model="later") not in (before, text(client))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_a_link_to_outside_is_not_read(
    clients: tuple[FlaskClient, FlaskClient], folder: Path, name: str
) -> None:
    outside = write(folder / f"outside {name}", 3)
    linked = write(folder / "adapters" / f"linked {name}", 3)
    (linked / name).unlink()
    (linked / name).symlink_to(outside / name)
    assert f"{name} is a link" in refused(clients[1], linked)
    (linked / name).unlink()
    (linked / name).symlink_to(folder / "adapters" / "later" / name)  # within the folder it may be one
    assert load(clients[1], name, linked).status_code == 200


def test_refusals_of_an_adapter_do_not_name_the_folders_of_the_server(
    clients: tuple[FlaskClient, FlaskClient], folder: Path
) -> None:
    broken = write(folder / "adapters" / "broken", 4)
    for text in ("{", "[]", '{"peft_type": "LORA", "bias": "all"}', None):
        (broken / "adapter_config.json").unlink()
        if text is not None:
            (broken / "adapter_config.json").write_text(text)
        assert str(folder) not in refused(clients[1], broken)
    broken = write(folder / "adapters" / "no tensors", 4)
    for data in (b"", b"\xff" * 100):
        (broken / "adapter_model.safetensors").write_bytes(data)
        assert str(folder) not in refused(clients[1], broken)


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
