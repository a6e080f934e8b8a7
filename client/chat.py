"""Talk to a model in the terminal.

MODEL starts a server with that model, which ends with the chat; http://HOST:PORT or --port is a server that runs. Without
either, it is the server on localhost:8500, or a new one with smollm2. /new starts a new conversation, /exit or Ctrl-D leaves,
and Ctrl-C stops an answer. Where the input is no terminal, each of its lines is a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import requests
from rich.console import Console

from terminal import console as out
from terminal.console import EXIT_CODES, FINE, SOME_FAILED, UNREACHABLE, emit, say
from terminal.options import Argument, Command, Number, Option
from terminal.progress import Reporter, State

from . import display, flags
from .send import servers
from .send.dialects import CHAT_PATH, Answer, Dialect, Refused, Unreadable, fault
from .send.events import NoEvents, watch
from .send.sse import Events, read_json
from .send.target import CONNECT_SECONDS, ServerUnreachable, Target, fetch, known

MODEL = "smollm2"
WARMTH = Number(0, 2, kind=float, name="T")
COMMAND = Command(
    "./eb chat", __doc__ or "",
    {
        "arguments": [Argument("where", "model or address, as above", required=False, metavar="[MODEL|URL]")],
        "options": [flags.PORT, flags.API_KEY, Option("--temperature", "0: greedy", WARMTH, default=0.0), flags.TIMEOUT],
    },
    {"exit codes": EXIT_CODES},
)  # fmt: skip


@display.guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Chat until the user leaves; return the exit code."""
    args = flags.parse(COMMAND, argv, environ)
    with contextlib.ExitStack() as stack:
        try:
            url = _address(args.where or "", args.port, args.api_key, console, stack)
        except servers.ServerFailed as error:
            say(console, f"error: cannot start a server with {args.where or MODEL}: {error}")
            return UNREACHABLE
        dialect = Dialect("chat", stream=True, temperature=args.temperature)
        target = Target(url, args.timeout, api_key=args.api_key, dialect=dialect)
        _await_model(url, console)
        return Chat(known(target), console).run()


def _address(where: str, port: int | None, key: str | None, console: Console, stack: contextlib.ExitStack) -> str:
    """Return the URL of the server, which is started if it must be, and then ends with `stack`."""
    if port or flags.is_address(where):
        return flags.at_port(flags.base_url(where or flags.LOCAL), port)
    if not where:
        with contextlib.suppress(ServerUnreachable):
            if fetch(Target(flags.LOCAL, api_key=key), "/v1/models") is not None:
                return flags.LOCAL
    model = where or MODEL
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
    with Reporter(console, lambda: State(0, None, f"starting a server with {model}"), after=0.0):
        return stack.enter_context(servers.started("dynamic", ["--model", model], log, key))[0]


def _await_model(url: str, console: Console) -> None:
    """Wait while a server that was just started loads its model; servers of other projects have no /ready."""
    end = time.monotonic() + servers.READY_SECONDS
    waiting = Reporter(console, lambda: State(0, None, "waiting until the server has loaded its model"))
    # What else is wrong is said at the first request.
    with waiting, contextlib.suppress(requests.RequestException), Target(url).session() as session:
        while time.monotonic() < end and session.get(f"{url}/ready", timeout=5).status_code == 503:
            time.sleep(0.3)


class Chat:
    """A conversation with a server."""

    def __init__(self, target: Target, console: Console) -> None:
        self._target, self._console = target, console
        self._messages: list[dict[str, str]] = []

    def run(self) -> int:
        """Answer messages until there are no more; return the exit code."""
        model, code = self._target.dialect.model or "a model", FINE
        if not asyncio.run(self._has_template()):
            say(self._console, f"note: {model} has no chat template, so it continues the conversation as plain text. Use "
                               f"a model that was trained for chats, as with ./eb chat {MODEL}")  # fmt: skip
        if sys.stdin.isatty():
            say(self._console, f"{model} at {self._target.url}. /new starts a new conversation, /exit leaves")
        for text in self._lines():
            if text == "/exit":
                break
            if text == "/new":
                self._messages.clear()
            elif re.fullmatch(r"/\w*", text):
                say(self._console, f"error: unknown command {text!r}. Use /new or /exit")
            elif text and not self._ask(text):
                code = SOME_FAILED
        return code

    def _lines(self) -> Iterator[str]:
        """Yield what the user enters."""
        if not sys.stdin.isatty():
            yield from map(str.strip, sys.stdin)
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  it lets input() edit and recall lines
        while True:
            try:
                yield input("> ").strip()
            except EOFError:
                emit("")
                return
            except KeyboardInterrupt:
                emit("\n(/exit or Ctrl-D leaves)")

    def _ask(self, text: str) -> bool:
        """Print the answer as it comes; return whether there is one. A message without one leaves the conversation."""
        answer, problem = Answer(), ""
        before, self._messages = self._messages, [*self._messages, {"role": "user", "content": text}]
        try:
            asyncio.run(self._receive(answer))
            if not answer.ended:
                problem = "error: the answer broke off. Ask again"
            elif answer.finish_reason == "length":
                problem = "note: the answer has reached the limit of tokens. /new starts a new conversation"
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            emit(" (stopped)", end="")
        except (Refused, Unreadable) as error:
            problem = f"error: {error}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = str(error) or f"no data for {self._target.timeout:g} s"
            problem = f"error: no answer from {self._target.url}: {reason}. Is the server running? Ask again"
        if answer.text:
            emit("")
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages = before
        if problem:
            say(self._console, problem)
        return not problem.startswith("error")

    async def _receive(self, answer: Answer) -> None:
        """Send the conversation; print the answer and add it to `answer`."""
        target, events = self._target, Events()
        model = {"model": target.dialect.model} if target.dialect.model else {}
        body = {**model, "messages": self._messages, "temperature": target.dialect.temperature, "stream": True}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=target.timeout)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=target.headers) as session,
            session.post(target.url + CHAT_PATH, json=body, proxy=target.proxy) as reply,
        ):
            if reply.status != 200:
                reason = fault(read_json(await reply.read()))[1]
                raise Refused("", reason or f"{target.url} answered HTTP {reply.status}. Check the address")
            async for received in reply.content.iter_any():
                for data in events.cut(received):
                    shown = len(answer.text)
                    target.dialect.feed(data, answer)
                    emit(answer.text[shown:], end="")

    async def _has_template(self) -> bool:
        """Return whether the model has a chat template. Only servers of this project tell; others count as having one."""
        with contextlib.suppress(NoEvents, aiohttp.ClientError, asyncio.TimeoutError):
            async with watch(self._target, silence=CONNECT_SECONDS, detail="1") as events:
                async for name, data in events:
                    state = read_json(data) if name == "state" else None
                    return not (isinstance(state, dict) and state.get("chats") is False)
        return True


if __name__ == "__main__":
    out.leave(main())
