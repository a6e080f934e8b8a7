"""Which other sites' pages may use the server: nobody's by default, those of --cors-origins, or any."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import engine_of
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app import create_app
from config import Config, ConfigError
from launch import banner
from tests.support.fakes import fake_engine
from tests.support.servers import Server

SITE, OTHER = "https://chat.example.org", "https://evil.example.org"
KEY = {"Authorization": "Bearer k"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

Start = Callable[..., FlaskClient]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return what makes a client of a server with these settings."""
    with contextlib.ExitStack() as engines:

        def made(**settings: Any) -> FlaskClient:
            engine = fake_engine()
            engines.callback(engine.manager.stop)
            return create_app(Config(access_log=False, **settings), engine).test_client()

        yield made


def preflight(client: FlaskClient, path: str = "/v1/completions", origin: str = SITE, **more: str) -> TestResponse:
    """Ask as a browser does before it sends JSON and a key to another site."""
    headers = {
        "Origin": origin, "Access-Control-Request-Method": "POST", "Sec-Fetch-Site": "cross-site",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }  # fmt: skip
    return client.options(path, headers=headers | more)


def sent(client: FlaskClient, path: str = "/v1/completions", origin: str = SITE, **fields: Any) -> TestResponse:
    """Send as a page of another site does."""
    headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"} | KEY
    body = {"prompt": "hi", "inputs": "hi", "num_tokens": 3} | fields
    return client.post(path, json=body, headers=headers)


def granted(reply: TestResponse) -> dict[str, str]:
    return {name: v for name, v in reply.headers.items() if name.startswith("Access-Control-")}


def test_by_default_options_is_no_method_and_nothing_is_granted(start: Start) -> None:
    client = start(api_key="k")
    for path, allowed in (("/v1/completions", "POST"), ("/stats", "GET, HEAD"), ("/policy", None)):
        for reply in (client.options(path), preflight(client, path)):
            assert reply.status_code == 405
            assert reply.headers["Allow"] == (allowed or "GET, HEAD, PUT")
            assert reply.get_json()["error"]["type"] == "invalid_request_error"
            assert not granted(reply)
            assert "Vary" not in reply.headers
    refused = sent(client)
    assert refused.status_code == 403
    assert "--cors-origins" in refused.get_json()["error"]["message"]
    assert client.options("/nowhere").status_code == 404


def test_a_listed_site_may_ask_before_it_sends_and_needs_no_key_for_it(start: Start) -> None:
    client = start(cors_origins=f"http://localhost:3000, {SITE}", api_key="k")
    for path in ("/v1/completions", "/requests/x", "/nowhere"):
        reply = preflight(client, path)
        assert (reply.status_code, reply.data) == (204, b"")
        found = granted(reply)
        assert found["Access-Control-Allow-Origin"] == SITE
        assert found["Access-Control-Allow-Headers"] == "authorization,content-type,x-stainless-os"
        assert {"GET", "POST", "PUT", "DELETE"} <= set(found["Access-Control-Allow-Methods"].split(", "))
        assert int(found["Access-Control-Max-Age"]) > 0
        assert "Access-Control-Allow-Credentials" not in found
        assert "Origin" in reply.vary
        assert reply.headers["X-Request-Id"]


def test_a_preflight_takes_no_place_in_the_queue(start: Start) -> None:
    client = start(cors_origins=SITE, max_queue=0, max_batch_size=1)
    places = engine_of(client.application).manager.inbox.places
    assert places.take(places.limit)
    assert preflight(client).status_code == 204
    assert sent(client).status_code == 429


def test_a_site_that_is_not_listed_is_as_without_the_setting(start: Start) -> None:
    client = start(cors_origins=SITE)
    for origin in (OTHER, f"{SITE}.evil.org", "null", SITE.replace("https", "http"), f"{SITE}:444"):
        for reply, status in (
            (preflight(client, origin=origin), 405), (sent(client, origin=origin), 403),
            (client.get("/stats", headers={"Origin": origin}), 200),
        ):  # fmt: skip
            assert reply.status_code == status, origin
            assert not granted(reply)
            assert "Origin" in reply.vary
    ordinary = client.options("/stats", headers={"Origin": SITE})  # no preflight: it asks nothing
    assert ordinary.status_code == 405
    assert client.post("/inference", json={"prompt": "x", "num_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {}), ("/v1/completions", {"stream": True}), ("/inference", {"stream": True}),
     ("/generate", {}), ("/generate_stream", {}), ("/", {}), ("/tokenize", {"inputs": None})],
)  # fmt: skip
def test_a_listed_site_may_send_and_read_answers_and_their_headers(
    start: Start, path: str, fields: dict[str, Any]
) -> None:
    reply = sent(start(cors_origins=SITE, api_key="k"), path, nonsense=1, **fields)
    assert reply.status_code == 200, reply.text
    assert granted(reply)["Access-Control-Allow-Origin"] == SITE
    exposed = granted(reply)["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "X-Ignored-Params", "Retry-After"} <= set(exposed)
    assert "nonsense" in reply.headers["X-Ignored-Params"]


def test_a_listed_site_may_read_every_refusal(start: Start) -> None:
    client = start(cors_origins=SITE, api_key="k", trusted_hosts="llm.example.org")
    origin = {"Origin": SITE, "Sec-Fetch-Site": "cross-site"}
    big = b'{"inputs": "' + b"x" * (1 << 20) + b'"}'
    for reply, status in (
        (client.post("/inference", json={}, headers=origin), 401),
        (sent(client, prompt=5), 400), (sent(client, "/generate", inputs=5), 422),
        (sent(client, model="gpt-5"), 404), (client.get("/nowhere", headers=origin | KEY), 404),
        (client.get("/inference", headers=origin | KEY), 405),
        (client.post("/generate", data=big, headers=origin | KEY), 415),
        (client.post("/inference", data=big, headers=origin | KEY), 413),
        (client.get("/stats", headers=origin | KEY | {"Host": "elsewhere"}), 400),
    ):  # fmt: skip
        assert reply.status_code == status
        assert granted(reply)["Access-Control-Allow-Origin"] == SITE


def test_any_site_may_send_without_credentials_if_that_is_asked_for(start: Start) -> None:
    client = start(cors_origins="*")
    for origin in (SITE, OTHER, "null"):
        for reply in (preflight(client, origin=origin), sent(client, origin=origin)):
            assert reply.status_code in (200, 204)
            assert granted(reply)["Access-Control-Allow-Origin"] == "*"
            assert "Access-Control-Allow-Credentials" not in granted(reply)
            assert "Origin" not in reply.vary  # the answer is the same for all
    with client.get("/events") as events:
        assert granted(events)["Access-Control-Allow-Origin"] == "*"


def test_the_headers_that_are_granted_are_those_that_were_asked_for(start: Start) -> None:
    client = start(cors_origins="*")
    name = "Access-Control-Request-Headers"
    for asked, answer in (("x-a, X-B", "x-a, X-B"), ("", None), ("a\x0bb", None), ("x" * 5000, None)):
        found = granted(preflight(client, **{name: asked}))
        assert found.get("Access-Control-Allow-Headers") == answer


@pytest.mark.parametrize(
    "text",
    ["chat.example.org", "https://a.example/", "https://a.example/chat", "https://*.example.org", "null",
     "https://", "https://u@a.example", "https://a.example,b", "https://a.example *"],
)  # fmt: skip
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--cors-origins: .*Use scheme://host"):
        Config(cors_origins=text)


def test_origins_are_compared_as_browsers_write_them() -> None:
    config = Config(cors_origins="HTTPS://A.Example:443,http://b:80,http://c:8080,http://[::1]:3000,app://x")
    assert config.origins == {"https://a.example", "http://b", "http://c:8080", "http://[::1]:3000", "app://x"}
    assert Config().origins == frozenset()
    assert Config(cors_origins="*, http://b").origins == {"*", "http://b"}


def test_any_site_without_a_key_is_warned_of(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    engine = start().application.extensions["service"].engine

    def said(**settings: str) -> str:
        banner.show(Config(host="127.0.0.1", **settings), engine, 1.0)
        return capsys.readouterr().err

    assert "warning: --cors-origins" in said(cors_origins="*")
    assert "warning" not in said(cors_origins=SITE)
    assert "warning" not in said(cors_origins="*", api_key="k")


# ---------------------------------------------------------------- a real browser, a real server


ASK = """
async ([url, stream]) => {
  const headers = {"Content-Type": "application/json", "Authorization": "Bearer k", "X-Request-Id": "from-a-page"}
  const body = JSON.stringify({prompt: "ROMEO:", max_tokens: 5, odd: 1, stream})
  try {
    const reply = await fetch(url + "/v1/completions", {method: "POST", headers, body})
    const deleted = await fetch(url + "/requests/nobody", {method: "DELETE", headers})
    const names = ["x-request-id", "x-ignored-params"]
    return [reply.status, await reply.text(), names.map(n => reply.headers.get(n)), deleted.status]
  } catch (error) { return String(error) }
}
"""


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt install chromium)")
def test_a_page_in_a_browser_reads_answers_of_a_server_that_lists_its_site(tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    argv = ("dynamic", "--model", "mock:llm-mock@100", "--access-log", "off")
    with api.sync_playwright() as playwright, Server(tmp_path / "shut.log", *argv, key="k", EB_API_KEY="k") as shut:
        site = f"http://localhost:{shut.port}"  # another site than 127.0.0.1
        page = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"]).new_page()
        page.goto(f"{site}/health")
        with Server(tmp_path / "open.log", *argv, "--cors-origins", site, key="k", EB_API_KEY="k") as listed:
            for stream in (False, True):
                status, text, headers, deleted = page.evaluate(ASK, [f"http://127.0.0.1:{listed.port}", stream])
                assert (status, headers, deleted) == (200, ["from-a-page", "odd"], 404)
                assert ("data: [DONE]" in text) == stream
        assert "Failed to fetch" in page.evaluate(ASK, [f"http://127.0.0.1:{shut.port}", False])
