"""`./eb vllm watch RECORD`: the live page, the figures and the policy of a vLLM that `./eb vllm serve --record RECORD` started."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from flask import request as current

import policies
from api.admin import operations, policy
from api.application import assemble, connect
from api.dialects import native
from api.http.deferral import App
from api.http.errors import ApiError
from api.pages import dashboard, events
from api.service import Engine, Service
from config import Config
from fleet.options import bind
from front.bridge import Bridge
from front.door import Door, expect, serve
from front.limits import Limits
from front.receiving import receive
from front.recorded import Line, Recorded
from front.server import Silent
from front.sites import LOCAL

PORT = 8700
CHANGES = ("/policy", "/web/markdown")  # that are served although their method is not GET


class Watch(Door):
    """The server; it follows the record while it serves."""

    def __init__(self, config: Config, path: Path) -> None:
        super().__init__(Limits(config.receive_timeout, config.send_timeout, config.connections, half_closed=0.0))
        self.service = Service(config, policies)
        self.recorded = Recorded(path, self._begin, self._restart)
        app = App("watch", static_folder=None)
        assemble(app, self.service, (native, operations, policy, events, dashboard))
        app.before_request(_refuse)
        self._bridge = Bridge(app)

    def _begin(self, head: Line) -> None:
        engine = Engine(
            model=cast(Any, None), tokenizer=cast(Any, Silent()), model_name="vLLM", device="none", dtype="", kv_dtype="",
            context=0, vocabulary=0, width=0, n_pages=head["pages"] + 1, page_size=head["page_size"], tokens_per_step=head["tokens"],
            manager=self.recorded, make_inference=cast(Any, None), grammars=cast(Any, None),
        )  # fmt: skip
        connect(self.service, engine)

    def _restart(self) -> None:
        """Have each page connect again: the next run of vLLM may have other slots."""
        for viewer in list(self.service.feed.viewers):
            viewer.gone = True

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard])
        app.router.add_route("*", "/{path:.*}", self._handle, expect_handler=expect)
        return app

    def generates(self, request: web.Request) -> bool:
        return False

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await receive(request, self.limits)
        self.open -= 1  # an open page must not keep the process from ending
        try:
            return await self._bridge.handle(request, body)
        finally:
            self.open += 1


def _refuse() -> None:
    if current.method in ("POST", "PUT", "DELETE") and current.path not in CHANGES:
        text = f"{current.method} {current.path} is not served here, where vLLM is only watched. Send requests to vLLM itself"
        raise ApiError(text, type="not_found_error")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; exit with 2 if the command line or the address is wrong."""
    parser = argparse.ArgumentParser("./eb vllm watch", description=__doc__, allow_abbrev=False)
    parser.add_argument("record", type=Path, help="the file that ./eb vllm serve --record writes; it may come later")
    parser.add_argument(
        "--host", default=LOCAL[0], help="default: %(default)s; for another one, EB_API_KEY must be set"
    )
    parser.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    given = parser.parse_args(argv)
    config = Config(policy="", host=given.host, port=given.port, api_key=os.environ.get("EB_API_KEY", ""))
    if config.host not in LOCAL and not config.api_key:
        parser.exit(2, f"error: --host {config.host} can be reached by others. Set EB_API_KEY, or use {LOCAL[0]}\n")
    try:
        sock = bind(config.host, config.port)
    except (OSError, OverflowError) as error:
        parser.exit(2, f"error: cannot listen at {config.address}: {error}. Use another --host or --port\n")
    print(f"watching {given.record} at http://{config.address}/", file=sys.stderr, flush=True)  # noqa: T201
    asyncio.run(_serve(Watch(config, given.record), sock))


async def _serve(watch: Watch, sock: socket.socket) -> None:
    stop, over = asyncio.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    follower = threading.Thread(target=watch.recorded.follow, args=(over,), daemon=True)
    follower.start()
    await serve(watch, sock, stop, 0.0)
    over.set()
    watch.service.stop()


if __name__ == "__main__":
    main()
