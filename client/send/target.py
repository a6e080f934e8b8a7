"""The server under load: its address, and its reports about itself.

`load` sends the requests.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import requests

from terminal.options import UsageError

from ..data import Planned
from .dialects import CHAT_PATH, Dialect

CONNECT_SECONDS = 5.0
STATS_SECONDS = 10.0
CANNOT_CONNECT = "cannot connect"
# Servers, by the owner of their models, that take fields beyond OpenAI's API, which itself and others refuse them.
COUNTING = ("effective-batching", "vllm", "sglang")


def environ_proxies(url: str) -> dict[str, str]:
    """Return the proxies of the environment for a URL: none for this machine, which no proxy reaches."""
    host = urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")
    return {} if is_here else requests.utils.get_environ_proxies(url)


class ServerUnreachable(RuntimeError):
    """No HTTP server answers at the address; the message names it and the remedy."""


class KeyRefused(UsageError):
    """The server requires an API key, or another one; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load, and how requests reach it."""

    url: str
    timeout: float = 600.0
    # Long enough for several retries of a SYN that a full backlog dropped.
    connect_timeout: float = 30.0
    api_key: str | None = field(default=None, repr=False)
    run: str = ""  # names the requests of a run, so that they have the same ids on every server
    dialect: Dialect = field(default_factory=Dialect)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request: the key, and no compression, which would delay chunks."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Accept-Encoding": "identity", **key}

    def names(self, planned: Planned) -> dict[str, str]:
        """Return the headers that name a request, its session and its program, as far as they have names."""
        id, call = f"{self.run}.{planned.index}" if self.run else "", planned.call
        names = {"X-Request-Id": id, "X-Session-ID": call.session if call else "", "X-Program-ID": planned.program}
        return {header: name for header, name in names.items() if name}

    @property
    def proxy(self) -> str | None:
        """The proxy for this address in the environment."""
        return requests.utils.select_proxy(self.url, environ_proxies(self.url))

    def session(self) -> requests.Session:
        """Return a session for a report of the server."""
        session = requests.Session()
        # A .netrc would replace our key, so only the proxies are read from the environment.
        session.proxies = environ_proxies(self.url)
        session.trust_env = False
        session.headers["Connection"] = "close"
        session.headers.update(self.headers)
        return session

    def ask(self, method: str, path: str, body: Any = None, seconds: float = STATS_SECONDS) -> requests.Response:
        """Return the server's answer to one request; raise ServerUnreachable if there is none, and KeyRefused on 401."""
        with self.session() as session:
            try:
                answer = session.request(method, self.url + path, json=body, timeout=(CONNECT_SECONDS, seconds))
            except (requests.RequestException, OSError, ValueError) as error:
                raise self.unreachable() from error
        if answer.status_code == 401:
            raise self.key_refused()
        return answer

    def unreachable(self) -> ServerUnreachable:
        """Return the error of a server that does not answer."""
        remedy = "Is the server running? Start it with ./server.sh dynamic, or check the address"
        if self.proxy:
            host, proxy = urlsplit(self.url).hostname, self.proxy.rpartition("@")[2]  # without its password
            remedy = f"The environment names the proxy {proxy} for it. Correct that, or set NO_PROXY={host}"
        return ServerUnreachable(f"cannot reach {self.url}. {remedy}")

    def key_refused(self) -> KeyRefused:
        """Return the error of a server that refuses the key, or the lack of one."""
        return KeyRefused(f"{self.url} requires an API key. Set EB_API_KEY or use --api-key KEY")


def fetch(target: Target, path: str) -> Any:
    """Fetch a JSON document; return None if the answer is not one. Raise as `Target.ask` does."""
    try:
        answer = target.ask("GET", path)
        return answer.json() if answer.status_code == 200 else None
    except (requests.JSONDecodeError, RecursionError):
        return None
    except ServerUnreachable as error:
        if isinstance(error.__cause__, requests.ReadTimeout):  # busy
            return None
        raise


def fetch_stats(target: Target) -> dict[str, Any] | None:
    """Fetch the server's `/stats`; return None if the server has no statistics."""
    body = fetch(target, "/stats")
    return body if isinstance(body, dict) else None


def fetch_context(target: Target) -> int | None:
    """Fetch the longest prompt and answer together that the server takes; None if it does not report it.

    Raise ServerUnreachable and KeyRefused as `fetch` does.
    """
    info, models = fetch(target, "/info"), fetch(target, "/v1/models")
    lengths = [info.get("max_total_tokens")] if isinstance(info, dict) else []
    with contextlib.suppress(KeyError, IndexError, TypeError):
        lengths.append(models["data"][0]["max_model_len"])
    return next((n for n in lengths if type(n) is int and n > 1), None)


def check_chat(target: Target, workload: str) -> None:
    """Raise UsageError for a server without the route of chats; ServerUnreachable and KeyRefused as `fetch` does."""
    # Without messages: a server that has the route refuses this before it generates anything.
    status = target.ask("POST", CHAT_PATH, {}).status_code
    if status in (404, 405, 501):
        raise UsageError(
            f"{target.url} has no {CHAT_PATH} (HTTP {status}), which --workload {workload} needs. Use a server with that "
            "route, or another workload, such as original"
        )


def known(target: Target) -> Target:
    """Return the target with its server's model and, for servers that have it, the usage in each chunk of a stream.

    Raise ServerUnreachable and KeyRefused as `fetch` does.
    """
    body = fetch(target, "/v1/models")
    try:
        model, owner = str(body["data"][0]["id"]), body["data"][0].get("owned_by")
    except (KeyError, IndexError, TypeError, AttributeError):
        return target
    dialect = replace(target.dialect, model=target.dialect.model or model, counts=owner in COUNTING)
    return replace(target, dialect=dialect)
