"""The servers that the cases share: one for each policy and way of starting, begun when first asked for."""

from __future__ import annotations

import contextlib
import subprocess
from base64 import b64encode
from collections import OrderedDict
from pathlib import Path

from harness import Setting, Watched

from tests.support.checkpoints import write_checkpoint

MOST = 3  # servers at once


class Fleet:
    """Starts servers as they are needed, and stops who has not been needed for longest."""

    def __init__(self, folder: Path) -> None:
        self.model = write_checkpoint(folder / "tiny")
        ranks = (f"{b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
        self.model.with_suffix(".tiktoken").write_text("".join(ranks))
        self._folder = folder
        self._started = 0
        self._servers: OrderedDict[tuple[str, str], Watched] = OrderedDict()

    def server(self, policy: str, setting: Setting) -> Watched:
        """Return the server of a policy and a setting, started if it is not running."""
        key = (policy, repr(setting))
        if key not in self._servers or self._servers[key].process.poll() is not None:
            while len(self._servers) >= MOST:
                self._servers.popitem(last=False)[1].stop()
            self._started += 1
            self._servers[key] = Watched(self._folder / f"log-{self._started}", policy, self.model, setting)
            self._servers[key].__enter__()
        self._servers.move_to_end(key)
        return self._servers[key]

    def forget(self, server: Watched) -> None:
        """Stop a server that a case has ended, or left in a state that others should not inherit."""
        self._servers = OrderedDict((k, s) for k, s in self._servers.items() if s is not server)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has been killed then
            server.stop()

    def close(self) -> None:
        for server in self._servers.values():
            server.stop()
