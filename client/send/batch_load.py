"""Sends the lines of a batch: a bounded number at a time, again while the server is full or away.

This module must not know files or a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from batch_files.job import is_final, read_json
from batch_files.lines import BadLine, Line, answer, failed, to_json

from .target import Target

BUSY = (429, 503)  # the server answers later
MAX_WAIT = 60.0  # seconds before the next try
FIRST_WAIT = 0.5


class NoProgress(Exception):
    """Nothing was answered for so long that the run ends; the message says why."""


@dataclass(slots=True)
class BatchRun:
    """Sends lines and passes their answers, as lines of JSON, to `write(line, is_error)`, as they end.

    The run ends when nothing was answered for `patience` seconds.
    """

    target: Target
    write: Callable[[bytes, bool], None]
    concurrency: int
    patience: float
    done: int = 0
    failed: int = 0
    tokens: int = 0
    _progress_at: float = 0.0

    async def send(self, lines: Iterator[Line | BadLine]) -> None:
        """Send all lines; raise NoProgress, KeyRefused, or the OSError of `write`."""
        self._progress_at = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self.target.timeout)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self.target.headers) as session:
            workers = [asyncio.create_task(self._work(session, lines)) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*workers)  # the first error ends all
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, session: aiohttp.ClientSession, lines: Iterator[Line | BadLine]) -> None:
        for line in lines:  # shared by all workers, so each line is taken once
            if isinstance(line, BadLine):
                self._keep(failed(line), is_error=True)
                await asyncio.sleep(0)
                continue
            status, id, body = await self._answer(session, line)
            self._keep(answer(line.custom_id, status, id, body), is_error=status >= 400)
            usage = body.get("usage") if isinstance(body, dict) else None
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            self.tokens += tokens if isinstance(tokens, int) else 0

    def _keep(self, line: dict[str, Any], is_error: bool) -> None:
        self.write(to_json(line), is_error)
        self.failed += is_error
        self.done += not is_error
        self._progress_at = time.monotonic()

    async def _answer(self, session: aiohttp.ClientSession, line: Line) -> tuple[int, str, Any]:
        """Return status, id and body of an answer that is neither a refusal to be repeated nor a broken connection."""
        wait = FIRST_WAIT
        while True:
            try:
                async with session.post(
                    self.target.url + line.url, json=line.body, proxy=self.target.proxy
                ) as response:
                    data = await response.read()
                    if response.status == 401:
                        raise self.target.key_refused()
                    body = read_json(data)
                    if response.status not in BUSY or is_final(body):
                        return response.status, response.headers.get("X-Request-Id", ""), body
                    problem = f"HTTP {response.status}"
                    wait = _seconds(response.headers.get("Retry-After")) or wait
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() - self._progress_at > self.patience:
                raise NoProgress(problem)
            # Not all at once, so that the server is not overrun when it comes back.
            await asyncio.sleep(min(wait, MAX_WAIT) * random.uniform(0.75, 1.25))
            wait = min(2 * wait, MAX_WAIT)


def _seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After header, 0 if it names none."""
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, float(header or 0))
    return 0.0
