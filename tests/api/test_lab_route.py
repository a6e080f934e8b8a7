"""The lab as the server serves it: its files alone, isolated, and only where that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.pages import dashboard
from app import create_app
from config import Config, ConfigError, load
from launch import preflight


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "index.html").write_text("<title>lab</title>")
    (tmp_path / "worker.js").write_text("1")
    monkeypatch.setattr(dashboard, "LAB_FOLDER", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("built")
def test_the_page_may_compile_webassembly_and_reach_the_labs_files_alone() -> None:
    client = create_app(Config(lab=True, api_key="k")).test_client()
    page = client.get("/lab/", headers={"Host": "localhost:8500"})
    assert page.mimetype == "text/html"
    policy = page.headers["Content-Security-Policy"]
    assert "'wasm-unsafe-eval'" in policy
    assert "'unsafe-eval'" not in policy
    assert "connect-src localhost:8500/lab/;" in policy
    assert page.headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert client.get("/lab/worker.js").headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert client.get("/lab/../app.py").status_code == client.get("/lab/none.js").status_code == 404
    strange = client.get("/lab/", headers={"Host": "x'; script-src *"})
    assert "script-src *" not in strange.headers.get("Content-Security-Policy", "")


@pytest.mark.usefixtures("built")
def test_a_server_that_was_not_asked_to_serve_the_lab_says_how() -> None:
    reply = create_app(Config()).test_client().get("/lab/")
    assert reply.status_code == 404
    assert "--lab" in reply.get_json()["error"]["message"]


def test_the_lab_needs_no_weights_and_must_have_been_built(built: Path) -> None:
    config = load(["--lab", "on"], environ={}).config
    assert config.model.startswith("mock:")
    assert load(["--lab", "on", "--model", "bard"], environ={}).config.model == "bard"
    preflight.check_lab(config, built)
    with pytest.raises(ConfigError, match=r"build_lab\.sh"):
        preflight.check_lab(config, built / "none")
