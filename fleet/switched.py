"""The policy that the fleet was switched to last, for replicas that start later.

Each is told before it gets its first request. This module must not know how replicas are chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp

from fleet.pool import Replica

PATH = "/policy"
PASSED = ("Authorization", "Content-Type")  # headers of the switch that a later replica gets, too
SECONDS = 5.0  # for a replica's answer


class Switched:
    """The last switch of all replicas, and which of them know it."""

    def __init__(self) -> None:
        self._body = b""
        self._headers: dict[str, str] = {}
        self._told: dict[str, asyncio.Future[None]] = {}

    def keep(self, body: bytes, headers: Mapping[str, str], told: Iterable[str]) -> None:
        """Remember a switch that these replicas have carried out."""
        self._body = body
        self._headers = {name: headers[name] for name in PASSED if name in headers}
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        self._told = dict.fromkeys(told, done)

    async def tell(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        """Switch a replica that does not know the last switch; all that wait for it wait for one request."""
        if not self._body:
            return
        if replica.name not in self._told:
            self._told[replica.name] = asyncio.ensure_future(self._send(replica, session))
        await asyncio.shield(self._told[replica.name])

    async def _send(self, replica: Replica, session: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        try:
            async with session.put(
                replica.url + PATH, data=self._body, headers=self._headers, timeout=timeout
            ) as answer:
                await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError):
            self._told.pop(replica.name, None)  # its next request tells it
