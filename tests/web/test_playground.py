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


def opened(tab: Tab, *expected: str) -> Any:
    tab.expected = [*expected]
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


@pytest.mark.full
def test_an_error_is_one_line_in_the_words_of_the_server(tab: Tab, server: Server) -> None:
    page = opened(tab, FAILED)
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


def test_what_is_typed_while_an_answer_streams_is_kept_and_enter_sends(tab: Tab) -> None:
    page = opened(tab)
    page.evaluate("EB.page.playground.fit({ chats: true })")
    page.fill("#tokens", "900")  # more than are written before all below has been done
    page.fill("#prompt", "the first")
    page.press("#prompt", "Enter")
    tab.until("document.querySelector('#send').disabled")
    assert page.input_value("#prompt") == ""
    page.fill("#prompt", "the next")
    page.press("#prompt", "Enter")  # an answer is being written: neither sent nor broken
    page.press("#prompt", "Shift+Enter")
    page.click("#cancel")
    tab.until(IDLE)
    assert page.input_value("#prompt") == "the next\n"
    assert page.locator("#answer .user").all_text_contents() == ["the first"]


def test_a_failed_message_goes_back_before_what_was_typed_meanwhile(tab: Tab) -> None:
    page = opened(tab, FAILED)
    page.evaluate("EB.page.playground.fit({ chats: true })")
    page.route("**/chat/completions", lambda route: route.abort())
    page.fill("#prompt", "asked")
    page.click("#send")
    tab.until(f"!document.querySelector('#answer-error').hidden && {IDLE}")
    assert page.input_value("#prompt") == "asked"
    assert page.locator("#answer .user").count() == 0


def test_an_answer_is_set_as_markdown_and_can_be_asked_for_again(tab: Tab, server: Server) -> None:
    page = opened(tab)
    page.evaluate("EB.page.playground.fit({ chats: true })")
    said = "# Title\n\n* **one**\n\n```\na < b\n```\n<img src=x onerror=alert(1)>[x](javascript:alert(1))[y](https://y.example)"
    message = {"content": said, "reasoning_content": "What is asked?"}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 9}}
    page.route("**/chat/completions", lambda route: route.fulfill(json=answer))
    page.click("#prompt-form summary")
    page.uncheck("#stream")
    page.fill("#prompt", "question")
    page.click("#send")
    tab.until("document.querySelector('#answer .markdown h1')")
    shown = page.locator("#answer .model")
    assert shown.locator(".thought").text_content() == "What is asked?"
    assert [shown.locator(tag).count() for tag in ("strong", "pre", "img", "script", "a")] == [1, 1, 0, 0, 1]
    assert "<img src=x" in str(shown.text_content())
    assert shown.locator("a").get_attribute("rel") == "noreferrer"
    page.click("#regenerate")
    tab.until(f"document.querySelectorAll('#answer .markdown').length === 1 && {IDLE}")
    assert page.evaluate("EB.page.playground.turns.map((turn) => turn.content)") == ["question", said]
    big = server.send("POST", "/web/markdown", b"x" * 300_000)
    assert big.status == 413
