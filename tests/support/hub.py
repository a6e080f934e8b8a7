"""A model hub on this machine: the few answers that the hub's client library asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest


@dataclass
class FakeHub:
    """Repositories as {name: {revision: {file: content}}}; each revision is its own commit."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: bool = False
    missing_bytes: int = 0  # which a download of weights lacks
    status: int = 200  # of every answer; 0 for none before `released`
    released: threading.Event = field(default_factory=threading.Event)
    downloads: list[str] = field(default_factory=list)
    requests: int = 0

    def publish(self, name: str, folder: Path, revision: str = "main") -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.repositories.setdefault(name, {})[revision] = files


def commit(revision: str) -> str:
    """Return the commit of a branch; a commit is its own."""
    return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        hub.requests += 1
        if hub.status == 0:
            hub.released.wait(60)
        if hub.status != 200:
            return self.reply(hub.status or 500)
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/").split("/")
        if len(path) < 4:  # what the client library asks beside repositories
            return self.reply(404)
        name, revision, file = "/".join(path[:2]), path[3], "/".join(path[4:])
        if name not in hub.repositories:
            return self.reply(404, {"X-Error-Code": "RepoNotFound"})
        revisions = {commit(key): files for key, files in hub.repositories[name].items()}
        files = revisions.get(commit(revision))
        if files is None:
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        if not file:
            siblings = [{"rfilename": key, "size": len(content)} for key, content in files.items()]
            return self.reply(
                200, body=json.dumps({"id": name, "sha": commit(revision), "siblings": siblings}).encode()
            )
        if hub.gated:
            return self.reply(403, {"X-Error-Code": "GatedRepo"})
        content = files[file]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit(revision)}
        if not body:
            return self.reply(200, {**headers, "Content-Length": str(len(content))})
        hub.downloads.append(file)
        if file.endswith(("safetensors", "gguf")) and hub.missing_bytes:
            content = content[: -hub.missing_bytes]
        return self.reply(200, headers, content)

    def reply(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def use(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client library ask the hub at `url`, with an empty cache."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Serve `hub` on a free port of this machine; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
