"""The prompt box of the live page: turns, alternatives to a token, errors, and what happens to its request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from browser import Tab, in_a_browser

from tests.support import wait_until
from tests.support.servers import Server

pytestmark = in_a_browser
IDLE = "!document.querySelector('#send').disabled"
FAILED = "Failed to load resource"  # what a browser logs for each refused request


def opened(tab: Tab) -> Any:
    page = tab.open()
    tab.until("document.querySelector('#status-text').textContent === 'live'")
    page.fill("#tokens", "12")
    return page


def test_a_token_under_the_pointer_shows_what_else_the_model_might_have_said(live: Tab) -> None:
    page = live.page
    page.fill("#tokens", "12")
    page.click("#send")
    live.until(f"document.querySelectorAll('#answer .token').length === 12 && {IDLE}")
    page.hover("#answer .token >> nth=3")
    assert page.locator("#alternatives li").count() == 5
    said = str(page.locator("#answer .token").nth(3).text_content()).replace(" ", "␣").replace("\n", "↵")
    assert page.locator("#alternatives .taken code").all_text_contents() == [said]
    page.hover("h1")
    assert page.is_hidden("#alternatives")
    page.focus("#answer")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#alternatives")
    assert str(page.text_content("#answer-timing")).count("12 tokens in") == 1
    page.click("#explain-answer")
    live.until("document.querySelector('#detail').textContent.includes('finished: length')")
    assert live.complaints == []


@pytest.mark.full
def test_a_chat_keeps_its_turns_until_a_new_one_begins(tab: Tab) -> None:
    page = opened(tab)
    sent: list[list[str]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/chat/completions"):
            sent.append([message["role"] for message in request.post_data_json["messages"]])

    page.on("request", note)
    page.evaluate("EB.page.playground.fit({ chats: true })")
    for turn in (1, 2):
        page.fill("#prompt", f"question {turn}")
        page.click("#send")
        tab.until(f"document.querySelectorAll('#answer .model').length === {turn} && {IDLE}")
    page.click("#new-chat")
    page.fill("#prompt", "another")
    page.click("#send")
    tab.until(f"document.querySelectorAll('#answer .model').length === 1 && {IDLE}")
    assert sent == [["user"], ["user", "assistant", "user"], ["user"]]
    assert tab.complaints == []


@pytest.mark.full
def test_an_error_is_one_line_in_the_words_of_the_server(tab: Tab, server: Server) -> None:
    page = opened(tab)
    stops = [*"abcdefghijklmnopq"]
    page.click("#prompt-form summary")
    page.fill("#stops", "\n".join(stops))
    page.click("#send")
    tab.until("!document.querySelector('#answer-error').hidden")
    body = json.dumps({"prompt": "x", "stop": stops}).encode()
    refused = server.send("POST", "/v1/completions", body, **{"Content-Type": "application/json"})
    assert refused.status == 400
    assert page.text_content("#answer-error") == refused.json["error"]["message"]
    assert page.is_enabled("#send")
    assert [said for said in tab.complaints if FAILED not in said] == []


def test_leaving_the_page_cancels_its_request(tab: Tab, server: Server) -> None:
    page = opened(tab)
    page.fill("#tokens", "900")
    page.click("#send")
    tab.until("document.querySelector('#rows .yours:not([hidden])')")
    id = page.evaluate("EB.page.playground.id")
    page.goto("about:blank")
    wait_until(lambda: server.get(f"/requests/{id}").json["finish_reason"] == "cancelled")


@pytest.mark.full
def test_a_blank_prompt_and_a_load_that_makes_no_sense_are_refused_beside_the_field(tab: Tab) -> None:
    page = opened(tab)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.method))
    page.fill("#prompt", "   ")
    page.click("#send")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.fill("#load-min", "300")
    page.fill("#load-max", "20")
    for button in ("#burst", "#poisson"):
        page.click(button)
        assert page.evaluate("document.activeElement.id") == "load-min"
    page.fill("#load-min", "10")
    page.fill("#load-count", "")
    page.click("#burst")
    assert page.evaluate("document.activeElement.id") == "load-count"
    assert "POST" not in asked
    page.fill("#prompt", "x")
    page.click("#send")
    tab.until(f"document.querySelectorAll('#answer .token').length === 12 && {IDLE}")
    assert tab.complaints == []
