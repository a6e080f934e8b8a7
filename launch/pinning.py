"""Pin the beginnings of the most common prompts in the prefix cache, before the loop starts.

Part of the composition root.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from api.service import Parts
from batch_files import sharegpt
from config import Config
from costs import mock
from generate.params import GREEDY
from scheduling.iteration import Plan
from scheduling.pages import PagePool


def pin(config: Config, parts: Parts, pages: PagePool) -> None:
    """Pin the pages with which most first messages of the file begin, and compute them, unless the model computes nothing.

    They are tokenized as chats if the model has a chat template. ValueError if the file or the pages do not suffice.
    """
    turns, _ = sharegpt.read(Path(config.pinned_prefixes))
    text = parts.tokenizer
    prompts = (
        text.encode_chat([{"role": "user", "content": first}])[1]
        if parts.chats
        else [*text.bos_ids, *text.encode(first)]
        for first, _ in turns
    )
    todo = sorted(pages.pin(prompts, config.pinned_pages, parts.context), key=lambda seq: seq.computed)
    size, rows = pages.page_size, max(1, (config.max_tokens_per_step or parts.tokens_per_step) // pages.page_size)
    while todo and not mock.is_mock(config.model):
        # Pages at the same depth need only those before them.
        step = [replace(seq, sampling=GREEDY) for seq in todo[:rows] if seq.computed == todo[0].computed]
        parts.model.forward(Plan(0, 0.0, step, [size] * len(step)))  # the numbers of real steps begin at 1
        del todo[: len(step)]
