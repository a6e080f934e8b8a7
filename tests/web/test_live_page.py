"""The live page in a real browser: what runs, what ran, and how it is moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import SMALL, WINDOW, Tab, assert_axe_finds_nothing_serious, in_a_browser

from tests.support import points
from tests.support.scheduling import drive, make_scheduler, requests
from tests.support.servers import Server
from tests.support.tokenizers import write

TINY_LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip

pytestmark = in_a_browser


def test_it_is_live_and_shows_what_runs_of_a_load_that_fills_the_batch(tab: Tab, server: Server) -> None:
    page = tab.open()
    tab.until("document.querySelector('#status-text').textContent === 'live'")
    page.fill("#load-count", "30")
    page.fill("#load-max", "40")
    page.click("#burst")
    tab.until("EB.page.live.columns.length > 10")
    tab.until("document.querySelectorAll('#rows tr').length > 20")
    assert page.text_content("#policy") == "static"
    tab.until("document.querySelector('#load-state').textContent === '30 of 30 answered'")
    shares = page.locator("#waste-legend b").all_text_contents()
    assert sum(int(share.split()[0]) for share in shares) == 100
    assert 8 in {row["batch_size"] for row in server.get("/stats").json["engine"]["batch_stats"]}


def test_the_box_streams_an_answer_and_text_stays_text(live: Tab) -> None:
    page = live.page
    prompt = "<img src=x onerror=alert(1)> O Romeo"
    page.fill("#prompt", prompt)
    page.fill("#tokens", "30")
    page.click("#send")
    live.until("!document.querySelector('#send').disabled && document.querySelector('#cancel').disabled")
    answer = page.text_content("#answer")
    assert answer.startswith(prompt)
    assert len(answer) > len(prompt)
    live.until("document.querySelector('#rows').textContent.includes('<img src=x')")
    page.click("#rows tr:has(.yours:not([hidden])) button")
    live.until("document.querySelector('#detail').textContent.includes('finished: length')")
    assert page.locator("#rows img, #detail img, #answer img").count() == 0


@pytest.mark.full
def test_the_box_sends_a_message_to_a_model_with_a_chat_template(chromium: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, "llama-bpe", eos_token=None)  # random weights could end an answer before it begins
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    flags = ("--model", str(folder), "--load-format", "dummy", "--device", "cpu", "--dashboard-show-text", "on")
    with Server(tmp_path / "log", "dynamic", *flags) as server:
        tab = Tab(chromium, server)
        page = tab.open()
        tab.until("document.querySelector('#prompt').value.endsWith('France?')")
        assert "/v1/chat/completions" in page.text_content("#curl")
        page.fill("#prompt", "Who are you?")
        page.click("#send")
        tab.until("document.querySelector('#rows').textContent.includes('[user] Who are you?')")
        tab.until("!document.querySelector('#send').disabled")
        assert page.text_content("#answer .user") == "Who are you?"
        assert page.text_content("#answer .model").strip()
        tab.close()
    assert tab.complaints == []


def test_it_pauses_steps_and_is_moved_by_keys(live: Tab, server: Server) -> None:
    page = live.page
    known = page.evaluate("EB.page.live.last?.n ?? 0")
    server.post(prompt="ROMEO:", num_tokens=12)
    live.until(f"EB.page.live.last?.n > {known + 5}")
    page.focus("#picture")
    page.keyboard.press("Space")
    before = page.evaluate("EB.page.index")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("EB.page.index") == before - 2
    assert page.text_content("#inspect").startswith("slot 0: #")
    assert page.text_content("#status-text") == "paused"
    page.keyboard.press("Enter")
    assert page.is_visible("#detail")
    page.keyboard.press("Space")
    live.until("EB.page.cursor === -1")


@pytest.mark.full
def test_it_finds_the_server_again(chromium: Any, tmp_path: Path) -> None:
    flags = ("--model", "mock:llm-mock@5", "--max-batch-size", "4")
    with Server(tmp_path / "log", "dynamic", *flags) as server:
        tab = Tab(chromium, server)
        page = tab.open()
        tab.until("document.querySelector('#status-text').textContent === 'live'")
        server.post(prompt="ROMEO:", num_tokens=20)
        tab.until("EB.page.live.columns.length === 20")
        server.stop()
        tab.until("!document.querySelector('#banner').hidden")
        assert "econnecting" in page.text_content("#banner")
        server.start().wait()
        tab.until("document.querySelector('#banner').hidden")
        server.post(prompt="ROMEO:", num_tokens=7)
        tab.until("EB.page.live.columns.length === 7")
        tab.close()


@pytest.mark.parametrize("scheme", points(1, "light", "dark"))
def test_it_fits_a_small_screen_and_axe_finds_nothing_serious(chromium: Any, server: Server, scheme: str) -> None:
    server.post(prompt="ROMEO:", num_tokens=12)
    tab = Tab(chromium, server, viewport=SMALL, color_scheme=scheme)
    page = tab.open()
    tab.until("document.querySelectorAll('#rows tr').length > 0")
    page.click(".who")
    tab.until("!document.querySelector('#detail').hidden")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    order = ("stage", "detail", "tiles", "spent", "try", "requests")  # the figures right after the picture
    tops = [page.locator(f"#{id}").bounding_box()["y"] for id in order]
    assert tops == sorted(tops)
    assert_axe_finds_nothing_serious(page)
    assert tab.complaints == []
    tab.close()


@pytest.mark.full
def test_64_slots_at_speed_stay_smooth_and_small(chromium: Any, server: Server) -> None:
    tab = Tab(chromium, server, is_calm=False, viewport=WINDOW)
    page = tab.open()
    tab.until("globalThis.EB && EB.page")
    page.evaluate(
        """() => {
          const model = EB.page.live;
          model.clear();
          globalThis.feedOn = (count) => {
            for (let k = 0; k < count; k++) {
              const n = (model.last?.n ?? 0) + 1;
              const members = Array.from({ length: 64 }, (_, slot) => {
                const age = (n + slot * 7) % 90;
                return { id: `r${slot}-${Math.floor((n + slot * 7) / 90)}`, slot, tokens: 1,
                  phase: age ? "decode" : "prefill", computed: age + 1, total: 90 };
              });
              const joined = members.filter((m) => m.phase === "prefill").map((m) => m.id);
              const left = members.filter((m) => m.computed === 90).map((m) => ({ id: m.id, reason: "length" }));
              model.add({ n, t: n * 0.02, seconds: 0.02, policy: "x", queue: n % 50, members, joined, left,
                slot_steps: { useful: 64, padding: 0, held: 0, idle: 0, recomputed: 0 },
                pages: { used: 1, total: 2 } });
            }
          };
        }"""
    )
    client = page.context.new_cdp_session(page)

    def heap() -> int:
        client.send("HeapProfiler.collectGarbage")
        return int(client.send("Runtime.getHeapUsage")["usedSize"])

    before = heap()
    page.evaluate("feedOn(3000)")
    page.evaluate("EB.page.frames.length = 0")
    page.evaluate(
        """async () => {
          for (let k = 0; k < 40; k++) {
            feedOn(1);
            await new Promise((done) => setTimeout(done, 20));
          }
        }"""
    )
    frames = sorted(page.evaluate("EB.page.frames"))
    assert len(frames) > 5
    # The quickest: the others wait for their turn where other programs use the processor.
    assert frames[0] < 1000 / 30, "a frame takes too long to draw"
    for _ in range(30):  # ten minutes at 50 a second
        page.evaluate("feedOn(1000)")
    assert page.evaluate("EB.page.live.columns.length") < 3000
    assert page.evaluate("EB.page.live.last.n") > 30_000
    assert heap() - before < 20e6
    tab.close()
    assert tab.complaints == []


def test_it_says_which_policy_failed_until_the_next_switch(live: Tab) -> None:
    page = live.page
    serves: dict[str, object] = {"policy": page.text_content("#policy"), "max_queue": 9}
    assert not page.is_visible("#policy-failure")
    failure = {"policy": "mine", "hook": "order", "file": "mine.py", "line": 7, "error": "KeyError: 3", "now": "static"}
    failure["time"] = 1.0
    page.evaluate(f"EB.page.feed.handlers.policy({json.dumps(serves | {'last_failure': failure})})")
    text = page.text_content("#policy-failure")
    assert all(word in text for word in ("mine", "order()", "line 7", "KeyError: 3", "static"))
    page.evaluate(f"EB.page.feed.handlers.policy({json.dumps(serves | {'last_failure': failure})})")
    assert not page.is_visible("#policy-failure")


def test_an_area_of_the_picture_is_summed_up_and_a_request_is_found_by_number(live: Tab, tmp_path: Path) -> None:
    run = drive(make_scheduler("dynamic", 4), requests((0, 5, 8), (0, 3, 8), (0, 2, 4)))
    page = live.replay(run.records(), tmp_path)
    page.evaluate("EB.page.player.play(false); EB.page.player.moveTo(1e9)")
    live.until("EB.page.picture.to === EB.page.model.columns.length - 1")
    places = page.evaluate(
        "(({picture: p, model}) => [[p.x0(0) + 1, 8], [p.x0(model.columns.length - 1) + 1, 8 + 2 * p.tall]])(EB.page)"
    )
    page.locator("#picture").scroll_into_view_if_needed()  # a test before this one may have scrolled the page
    box = page.locator("#picture").bounding_box()
    for act, (x, y) in zip((page.mouse.down, page.mouse.up), places):
        page.mouse.move(box["x"] + x, box["y"] + y)
        act()
    tokens = sum(member["tokens"] for record in run.records() for member in record["members"])
    live.until("document.querySelector('#inspect').textContent.startsWith('iterations')")
    said = str(page.text_content("#inspect"))
    assert f"{tokens} tokens computed for 3 requests: #1 #2 #3" in said, said
    assert said.startswith("iterations 1 to 8 ")
    page.fill("#find-what", "#2")
    page.press("#find-what", "Enter")
    live.until("document.querySelector('#detail h2')?.textContent.startsWith('Request #2 ')")
    page.fill("#find-what", "999")
    page.press("#find-what", "Enter")
    live.until("!document.querySelector('#find-error').hidden")


def test_requests_have_the_same_numbers_on_every_page(tab: Tab, server: Server) -> None:
    tab.open()
    tab.until("document.querySelector('#status-text').textContent === 'live'")
    id = server.post(prompt="hi", num_tokens=3).json["id"]
    tab.until(f"EB.page.live.numbers.has('{id}')")
    first = tab.page.evaluate(f"EB.page.live.numbers.get('{id}')")
    server.post(prompt="hi", num_tokens=3)
    tab.open()  # opened later, it has another history
    tab.until(f"EB.page.live.numbers.has('{id}')")
    assert tab.page.evaluate(f"EB.page.live.numbers.get('{id}')") == first
