"""The commands of docs/queue.md, as they are written there, before a stand-in of the server that each is about."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil

import pytest
from scripted import queueing, scripted

from integrations.queue import options
from tests.support import ROOT, run_async

SECTIONS = re.split(r"^## ", (ROOT / "docs" / "queue.md").read_text(), flags=re.MULTILINE)
BLOCKS = {
    section.partition(",")[0]: block
    for section in SECTIONS
    for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
}


def commands(block: str, program: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[len(program.split()) :] for line in lines if line.startswith(program)]


async def run(block: str) -> None:
    """Start the queue of a block before a scripted upstream, and send its requests with curl."""
    async with scripted(4, 0.002) as upstream:
        (words,) = commands(block, "./eb queue")
        plan = await asyncio.to_thread(options.parse, [upstream.url if "://" in word else word for word in words])
        config = plan.config
        flags = {"policy_option": config.policy_option, "api_key": config.api_key}
        async with queueing([upstream], config.policy, plan.sites.slots, plan.settings, flags) as front:
            for ask in commands(block, "curl"):
                url = [word.replace("localhost:8600", front.url) for word in ask]
                sent = await asyncio.create_subprocess_exec("curl", "-sSf", *url, stdout=asyncio.subprocess.PIPE)
                assert (await sent.communicate())[0]
                assert sent.returncode == 0
        heads: list[dict[str, str]] = [head for _, head, body, _ in upstream.seen if body]
        assert len(heads) == block.count("curl ")
        assert all(head["Content-Type"] == "application/json" for head in heads)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here: apt install curl")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_commands_work_as_they_are_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_INTERNAL_COMPLETE", "1")
    for word in re.findall(r"(\w+)=(\S+)", "".join(re.findall(r"^export (.*)", BLOCKS[name], re.MULTILINE))):
        monkeypatch.setenv(*word)
    run_async(asyncio.wait_for(run(BLOCKS[name]), 180))


def test_the_sections_have_commands() -> None:
    assert list(BLOCKS) == ["Ollama", "llama.cpp", "A hosted API"]
