"""Serving where Linux's own calls are missing, as on macOS: a stand-in for a machine that no test runs on."""

from __future__ import annotations

import os
import shutil
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from generate import machine
from launch.worker import connections
from launch.worker.worker import Worker
from tests.support import wait_until
from tests.support.servers import Server

# Python runs this at its start: what macOS lacks is gone before anything is imported.
WITHOUT_LINUX = """
import mmap, os, pathlib, select, selectors, socket
ABSENT = {
    select: ("epoll", *(name for name in dir(select) if name.startswith("EPOLL")), "POLLRDHUP"),
    os: ("sched_getaffinity", "sched_setaffinity", "eventfd", "memfd_create", "pidfd_open", "posix_fallocate"),
    mmap: ("MADV_HUGEPAGE",),
    socket: ("SO_PEERCRED", "TCP_CORK", "TCP_QUICKACK", "TCP_USER_TIMEOUT"),
}
for module, names in ABSENT.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
selectors.DefaultSelector = selectors.PollSelector  # it may have been imported before this
sysconf, open_path = os.sysconf, pathlib.Path.open

def without_free_pages(name):
    if name == "SC_AVPHYS_PAGES":
        raise ValueError("unrecognized configuration name")
    return sysconf(name)

def without_proc(path, *args, **options):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return open_path(path, *args, **options)

os.sysconf, pathlib.Path.open = without_free_pages, without_proc
"""


@pytest.mark.full
@pytest.mark.process
def test_a_server_without_linux_serves_cancels_and_drains(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    compiler = tmp_path / "cc"  # as Apple's clang, which has no OpenMP
    compiler.write_text(
        '#!/bin/sh\nfor flag; do [ "$flag" = -fopenmp ] && echo "unsupported option -fopenmp" >&2 && exit 1; done\n'
        f'exec {shutil.which("cc")} "$@"\n'
    )
    compiler.chmod(0o755)
    variables = {"PYTHONPATH": str(tmp_path), "CC": str(compiler), "EB_CACHE_DIR": str(tmp_path / "cache")}
    body = {"prompt": "ROMEO:", "num_tokens": 12, "temperature": 0}
    with Server(tmp_path / "plain", "dynamic", "--model", "bard") as server:
        expected = server.post(**body).json["completion"]
    with Server(tmp_path / "log", "dynamic", "--model", "bard", **variables) as server:
        assert server.post(**body).json["completion"] == expected
        assert "falls back to PyTorch" not in server.output()  # the kernels were compiled, though without OpenMP
        with socket.create_connection(("127.0.0.1", server.port), 60) as impatient:
            text = b'{"prompt": "a", "num_tokens": 1000}'
            impatient.sendall(
                b"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
            )
            wait_until(lambda: server.get("/stats").json["requests-running"] == 1)
        wait_until(lambda: server.get("/stats").json["http"]["cancelled"] == 1)
        assert server.stop() == 0
        assert "Traceback" not in server.output()


def test_where_free_memory_is_unknown_half_of_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError(name)
        return {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}[name]

    def missing(path: Path, **options: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.setattr(Path, "read_text", missing)
    assert machine.free_memory(torch.device("cpu")) == 8 << 30


@pytest.mark.parametrize("inherited", [True, False])
def test_each_connection_is_limited_where_none_inherits_the_listeners_limits(
    monkeypatch: pytest.MonkeyPatch, inherited: bool
) -> None:
    ours, clients = socket.socketpair()
    registered: list[socket.socket] = []
    worker = object.__new__(Worker)
    worker.alive, worker.pending_conns = True, deque()
    worker.poller = SimpleNamespace(register=lambda sock, *_: registered.append(sock))
    service = SimpleNamespace(config=SimpleNamespace(receive_timeout=0.01, send_timeout=0.01))
    worker.wsgi = SimpleNamespace(extensions={"service": service})
    monkeypatch.setattr(connections, "LIMITS_ARE_INHERITED", inherited)
    with ours, clients:
        worker.enqueue_req(SimpleNamespace(sock=ours, initialized=False, data_ready=False))
        limit = ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    assert registered == [ours]
    assert any(limit) != inherited
