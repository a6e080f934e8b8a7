"""transformers: its continuous batching where that runs, otherwise one padded batch; offline."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import OfflinePeer, Order, Requests, Serve, answer

LIMIT = 600.0  # seconds of one burst


class Transformers(OfflinePeer):
    """`program` is the Python of an environment with torch and transformers."""

    name = "transformers"
    install = "python3 -m venv tf; tf/bin/pip install torch transformers; --peer transformers=tf/bin/python"
    formats = ("bfloat16", "float32")
    module = "benchmarks.peers.hugging_face"


class Model:
    """A model and its tokenizer. A request gets exactly the tokens that it asks for, greedily."""

    def __init__(self, order: Order) -> None:
        self.torch = importlib.import_module("torch")
        if order.threads:
            self.torch.set_num_threads(order.threads)
        transformers = importlib.import_module("transformers")
        dtype = getattr(self.torch, order.format)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(order.model, dtype=dtype).eval()
        # AutoTokenizer guesses a class from config.json and may split the text in another way.
        file = str(Path(order.model) / "tokenizer.json")
        self.tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(file)
        self.make_config = transformers.GenerationConfig

    def ids(self, requests: Requests) -> list[list[int]]:
        return [self.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt, _ in requests]

    def static(self, requests: Requests) -> int:
        """Answer as one batch, padded on the left, that runs until the longest is done."""
        prompts = self.ids(requests)
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = self.torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        most = max(tokens for _, tokens in requests)
        with self.torch.inference_mode():
            self.model.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=None,
                max_new_tokens=most, min_new_tokens=most,
            )  # fmt: skip
        return sum(tokens for _, tokens in requests)

    def continuous(self, requests: Requests) -> int:
        """Answer by transformers' own continuous batching. RuntimeError when it takes too long."""
        most = max(tokens for _, tokens in requests)
        config = self.make_config(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=most)
        with self.model.continuous_batching_context_manager(generation_config=config) as manager:
            for i, (ids, (_, tokens)) in enumerate(zip(self.ids(requests), requests)):
                manager.add_request(ids, request_id=str(i), max_new_tokens=tokens)
            return self._collect(manager, len(requests))

    def _collect(self, manager: Any, count: int) -> int:
        done = tokens = 0
        end = time.monotonic() + LIMIT
        while done < count:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done, tokens = done + 1, tokens + len(result.generated_tokens)
            elif time.monotonic() > end or not manager.is_running():
                raise RuntimeError(f"{done} of {count} answers")
        return tokens


def load(order: Order) -> Serve:
    """Return the way that answers more tokens per second here; a single request needs no batching."""
    model = Model(order)
    trial = [(prompt, 16) for prompt, _ in order.burst]
    seconds = {}
    for way in (model.static, model.continuous):
        try:
            way(trial[:2])
            began = time.perf_counter()
            way(trial)
            seconds[way] = time.perf_counter() - began
        except Exception as error:  # a way that does not run here leaves the other
            print(f"{way.__name__}: {type(error).__name__}: {error}")
    fastest = min(seconds, key=seconds.__getitem__)
    return lambda requests: (fastest if len(requests) > 1 else model.static)(requests)


if __name__ == "__main__":
    answer(load)
