"""Any repository of the hub is found, downloaded once and checked; what cannot be served costs no download of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from models import weights
from models.sources import catalog, wheel
from models.sources.catalog import ModelUnavailable
from models.sources.checkpoint import CheckpointError
from tests.support.checkpoints import reference_of, save
from tests.support.gguf import LLAMA_KEYS, converted, random_model
from tests.support.hub import FakeHub, commit, serving, use


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `save_pretrained` writes it, with a file in place of a tokenizer and one that is not needed."""
    folder = save(tmp_path_factory.mktemp("model"), reference_of("qwen3"))
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin"):
        (folder / name).write_text(f'{{"of": "{name}"}}')
    return folder


@pytest.fixture
def hub(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    fake.publish("owner/model", checkpoint)
    with serving(fake) as url:
        use(url, tmp_path / "cache", monkeypatch)
        yield fake


def refusal(model: str, kind: type[Exception] = ModelUnavailable) -> str:
    with pytest.raises(kind) as error:
        catalog.resolve(model, timeout_s=20)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_repository_is_downloaded_once_its_weights_last(hub: FakeHub) -> None:
    first = catalog.resolve("owner/model")
    assert (first.name, first.revision, first.load_format) == ("owner/model", commit("main"), "auto")
    assert hub.downloads[0] == "config.json"
    assert hub.downloads[-1] == "model.safetensors"
    assert set(hub.downloads[1:-1]) == {"generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert weights.load(first).config.family == "qwen3"
    before = hub.requests
    assert catalog.resolve("owner/model") == first
    assert hub.requests == before
    assert catalog.is_here("owner/model")


def test_a_revision_is_chosen_with_an_at_sign(hub: FakeHub, tmp_path: Path, checkpoint: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    hub.publish("owner/model", folder, "v2")
    assert catalog.resolve("owner/model@v2").architecture.norm_epsilon == 0.25
    assert not catalog.is_here("owner/model")
    pinned = catalog.resolve(f"owner/model@{commit('v2')}")
    assert (pinned.architecture.norm_epsilon, pinned.revision) == (0.25, commit("v2"))


def test_random_weights_need_only_the_small_files(hub: FakeHub) -> None:
    resolved = catalog.resolve("owner/model", "dummy")
    assert resolved.path is None
    assert "model.safetensors" not in hub.downloads
    assert weights.load(resolved).config.qk_norm


def test_a_gated_a_missing_and_a_private_repository_are_named_with_the_remedy(hub: FakeHub) -> None:
    assert "has no revision 'v9'" in refusal("owner/model@v9")
    missing = refusal("owner/nothing")
    assert "no repository owner/nothing" in missing
    assert "HF_TOKEN" in missing
    hub.gated = True
    gated = refusal("owner/model")
    assert "owner/model is gated" in gated
    assert "/owner/model, and set HF_TOKEN" in gated
    assert hub.downloads == []


def test_a_repository_without_safetensors_is_refused_and_its_gguf_file_named(hub: FakeHub) -> None:
    files = hub.repositories["owner/model"]["main"]
    del files["model.safetensors"]
    assert "has no safetensors" in refusal("owner/model")
    files["model-q4.gguf"] = b""
    assert "--model owner/model:model-q4.gguf" in refusal("owner/model")
    del files["config.json"]
    assert "has no config.json" in refusal("owner/model")
    assert set(hub.downloads) <= {"config.json"}


def test_an_architecture_that_cannot_be_served_costs_no_download_of_weights(hub: FakeHub) -> None:
    files = hub.repositories["owner/model"]["main"]
    files["config.json"] = json.dumps({"model_type": "mamba"}).encode()
    assert "'mamba'" in refusal("owner/model", CheckpointError)
    assert hub.downloads == ["config.json"]


def test_a_truncated_download_leaves_nothing_and_can_be_repeated(hub: FakeHub, tmp_path: Path) -> None:
    hub.missing_bytes = 10
    assert "the download of model.safetensors failed" in refusal("owner/model")
    assert not catalog.is_here("owner/model")
    blobs = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert blobs == []
    hub.missing_bytes = 0
    assert weights.load(catalog.resolve("owner/model")).parameters > 0


def test_a_disk_that_is_too_small_is_reported_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert "set HF_HOME to another disk" in refusal("owner/model")
    assert hub.downloads == ["config.json"]


def test_a_gguf_file_of_the_hub_and_of_the_package_index_is_served(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = converted(tmp_path / "tiny.gguf", random_model("llama", rope_theta=5000.0), LLAMA_KEYS)
    hub.repositories["owner/files"] = {"main": {"tiny-q8.gguf": local.read_bytes()}}
    assert "Did you mean 'tiny-q8.gguf'?" in refusal("owner/files:tiny-q4.gguf")
    monkeypatch.setattr(wheel, "fetch", lambda timeout_s: local)
    assert not catalog.is_here("owner/files:tiny-q8.gguf")
    networks = []
    for model, name in (("owner/files:tiny-q8.gguf", "tiny-q8"), (str(local), "tiny"), ("smollm2", "smollm2")):
        resolved = catalog.resolve(model)
        assert (resolved.name, resolved.tokenizer) == (name, resolved.path)
        networks.append(weights.load(resolved))
    assert catalog.is_here("owner/files:tiny-q8.gguf")
    for other in networks[1:]:
        assert all(bool((a == b).all()) for a, b in zip(networks[0].tensors(), other.tensors()))
