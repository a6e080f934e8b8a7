"""What happens when the hub cannot be reached: the default model, names, and the cache."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support_checkpoints import reference, save

from models import catalog, hub


@pytest.fixture
def bard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a tiny checkpoint stand for the built-in model, and the cache of the hub be empty."""
    folder = save(tmp_path / "bard", reference())
    monkeypatch.setattr(catalog, "BARD", folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return folder


class Unwilling(BaseHTTPRequestHandler):
    """A hub that answers with the server's `status`, or not before its `released`."""

    def do_HEAD(self) -> None:
        if self.server.status == 0:
            self.server.released.wait(30)
        self.send_response(self.server.status or 500)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(params=[404, 401, 503, 0, "refused"], ids=["404", "401", "503", "hanging", "refused"])
def bad_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if request.param == "refused":
        with socket.socket() as taken:  # bound and not listening: connections are refused
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
            monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *a, **k: url)
            yield
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unwilling)
    server.status, server.released = request.param, threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/x"
    monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda *a, **k: url)
    yield
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("bad_hub")
def test_without_the_hub_the_default_becomes_bard_and_a_name_is_refused_in_time(bard: Path) -> None:
    began = time.perf_counter()
    resolved = catalog.resolve(None, timeout_s=0.4)
    assert (resolved.name, resolved.requested, resolved.path) == ("bard", None, bard)
    assert resolved.warning is not None
    assert re.search(r"cannot load gpt2-medium: .*hub.* bard .*INSTEAD.* Set HF_HOME", resolved.warning)
    with pytest.raises(catalog.ModelUnavailable, match=r"cannot load gpt2-xl: .* Use --model bard"):
        catalog.resolve("gpt2-xl", timeout_s=0.4)
    assert time.perf_counter() - began < 20  # two questions, whatever retries the client has


def test_a_name_server_that_hangs_is_left_behind_in_time(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: released.wait(30))
    resolved = catalog.resolve(None, timeout_s=0.2)  # returns before the name server is released
    assert "did not answer within 0.2 s" in str(resolved.warning)
    released.set()


def test_offline_mode_sends_no_request(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: pytest.fail("asked"))
    assert "HF_HUB_OFFLINE" in str(catalog.resolve(None).warning)


def test_a_failed_download_is_reported(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    assert "No space left on device" in str(catalog.resolve(None).warning)
    with pytest.raises(catalog.ModelUnavailable, match="No space left on device"):
        catalog.resolve("distilgpt2")


def test_a_missing_bard_is_an_error_with_both_reasons(bard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bard / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(catalog.ModelUnavailable, match=r"HF_HUB_OFFLINE.*git checkout"):
        catalog.resolve(None)
    with pytest.raises(catalog.ModelUnavailable, match=r"tools/train_bard\.py"):
        catalog.resolve("bard")


def test_the_pinned_revision_is_downloaded_once_and_then_found_in_the_cache(
    bard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append(repo)
        assert "pytorch_model.bin" not in allow_patterns
        folder = tmp_path / "cache" / f"models--{repo.replace('/', '--')}" / "snapshots" / revision
        return str(save(folder, reference()))

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    first, second = (catalog.resolve(name) for name in (None, "openai-community/gpt2-medium"))
    assert asked == ["openai-community/gpt2-medium"]
    assert first.name == second.name == "gpt2-medium"
    assert first.revision == hub.PUBLISHED["gpt2-medium"].revision
    assert first.path == second.path
    assert first.warning is None
