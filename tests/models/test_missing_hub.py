"""What happens when the hub cannot be reached: the default model, names, and the cache."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from models.sources import catalog, hub
from tests.support.checkpoints import reference, save
from tests.support.hub import FakeHub, serving, use


@pytest.fixture
def bard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a tiny checkpoint stand for the built-in model, and the cache of the hub be empty."""
    folder = save(tmp_path / "bard", reference())
    monkeypatch.setattr(catalog, "BARD", folder)
    use("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)
    return folder


@pytest.fixture(params=[404, 401, 503, 0, "refused"], ids=["404", "401", "503", "hanging", "refused"])
def bad_hub(request: pytest.FixtureRequest, bard: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "refused":
        with socket.socket() as taken:  # bound and not listening: connections are refused
            taken.bind(("127.0.0.1", 0))
            use(f"http://127.0.0.1:{taken.getsockname()[1]}", bard.parent / "cache", monkeypatch)
            yield
        return
    with serving(FakeHub(status=request.param)) as url:
        use(url, bard.parent / "cache", monkeypatch)
        yield


@pytest.mark.usefixtures("bad_hub")
def test_without_the_hub_the_default_becomes_bard_and_a_name_is_refused_in_time(bard: Path) -> None:
    began = time.perf_counter()
    resolved = catalog.resolve(None, timeout_s=0.4)
    assert (resolved.name, resolved.requested, resolved.path) == ("bard", None, bard)
    assert resolved.warning is not None
    assert re.search(
        r"cannot load gpt2-medium: .*hub.* bard .*INSTEAD.* --model smollm2 .* set HF_HOME", resolved.warning
    )
    with pytest.raises(catalog.ModelUnavailable, match=r"cannot load gpt2-xl: .* Use --model bard"):
        catalog.resolve("gpt2-xl", timeout_s=0.4)
    assert time.perf_counter() - began < 60  # two questions, whatever retries the client has


def test_a_name_server_that_hangs_is_left_behind_in_time(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: released.wait(30))
    resolved = catalog.resolve(None, timeout_s=0.2)  # returns before the name server is released
    assert "did not answer within 0.2 s" in str(resolved.warning)
    released.set()


def test_offline_mode_sends_no_request(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: pytest.fail("asked"))
    assert "HF_HUB_OFFLINE" in str(catalog.resolve(None).warning)


def test_a_failed_download_is_reported(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub_of_one = FakeHub()
    for published in hub.PUBLISHED.values():
        hub_of_one.publish(published.repository.name, bard, published.repository.revision)
    with serving(hub_of_one) as url:
        use(url, bard.parent / "cache", monkeypatch)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
        assert "No space left on device" in str(catalog.resolve(None).warning)
        with pytest.raises(catalog.ModelUnavailable, match=r"No space left on device.*HF_HOME to another disk"):
            catalog.resolve("distilgpt2")


def test_a_missing_bard_is_an_error_with_both_reasons(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bard / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(catalog.ModelUnavailable, match=r"HF_HUB_OFFLINE.*git checkout"):
        catalog.resolve(None)
    with pytest.raises(catalog.ModelUnavailable, match=r"tools/train_bard\.py"):
        catalog.resolve("bard")


def test_the_pinned_revision_is_downloaded_once_and_then_found_in_the_cache(
    bard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = hub.PUBLISHED["gpt2-medium"].repository
    fake = FakeHub()
    fake.publish(pinned.name, bard, pinned.revision)
    with serving(fake) as url:
        use(url, bard.parent / "cache", monkeypatch)
        first, second = (catalog.resolve(name) for name in (None, "openai-community/gpt2-medium"))
    assert fake.downloads.count("model.safetensors") == 1
    assert first.name == second.name == "gpt2-medium"
    assert first.revision == pinned.revision
    assert first.path == second.path
    assert first.warning is None
