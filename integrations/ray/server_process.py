"""The server of one replica: the project's own, on a free port, which never outlives the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from client.send.servers import APP, free_port, wait_until_ready
from terminal.option_types import address

# Ends the server when this end of the pipe closes, which it also does when the parent is killed; ends when the server does.
LEASH = """exec 3<&0
"$@" < /dev/null 3<&- & server=$!
{ read _; kill -TERM $server; } <&3 & reader=$!
exec 3<&-
wait $server; status=$?
kill $reader 2> /dev/null
exit $status"""


class ServerProcess:
    """A server with these settings (`Config.to_environment`), started at once and ready after `wait`."""

    def __init__(self, environment: Mapping[str, str], host: str = "127.0.0.1") -> None:
        port = free_port()
        self.url = f"http://{address(host, port)}"
        handle, name = tempfile.mkstemp(prefix="eb-replica-", suffix=".log")
        self.log = Path(name)
        command = [sys.executable, str(APP), "--host", host, "--port", str(port)]
        with os.fdopen(handle, "w") as file:
            self._process = subprocess.Popen(
                ["sh", "-c", LEASH, "sh", *command], stdin=subprocess.PIPE, stdout=file, stderr=file,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        """Return when it is ready; raise ServerFailed with the end of its log if it exits instead."""
        wait_until_ready(self.url, self._process, self.log)

    def drain(self, seconds: float) -> None:
        """Let it answer the requests that it has, and end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)  # its own session: nothing else is in it
            self._process.wait()
        self.log.unlink(missing_ok=True)
