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


class ServerUnreachable(Exception):
    """No HTTP server answers at the address."""


class KeyRefused(Exception):
    """The server requires an API key, or another one."""


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


def fetch(target: Target, path: str) -> Any:
    """Fetch a JSON document; return None if the answer is not one.

    Raise ServerUnreachable if nothing answers, and KeyRefused on 401.
    """
    with target.session() as session:
        try:
            answer = session.get(target.url + path, timeout=(CONNECT_SECONDS, STATS_SECONDS))
            body = answer.json() if answer.status_code == 200 else None
        except (requests.ReadTimeout, requests.JSONDecodeError, RecursionError):
            return None
        except requests.ConnectionError as error:
            raise ServerUnreachable(f"no server answers at {target.url}") from error
        except (requests.RequestException, OSError, ValueError) as error:
            raise ServerUnreachable(str(error)) from error
    if answer.status_code == 401:
        raise KeyRefused
    return body


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
    with target.session() as session:
        try:
            # Without messages: a server that has the route refuses this before it generates anything.
            status = session.post(target.url + CHAT_PATH, json={}, timeout=(CONNECT_SECONDS, STATS_SECONDS)).status_code
        except (requests.RequestException, OSError, ValueError) as error:
            raise ServerUnreachable(f"no server answers at {target.url}") from error
    if status == 401:
        raise KeyRefused
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
