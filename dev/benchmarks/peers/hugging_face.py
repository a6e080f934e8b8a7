"""transformers: its continuous batching where that runs, otherwise one padded batch; offline."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from dev.benchmarks.peers.peer import OfflinePeer, Order, Requests, Serve, answer

LIMIT = 600.0  # seconds of one burst
Burst = list[tuple[list[int], int]]  # the prompt of each request, and the number of tokens to answer


class Transformers(OfflinePeer):
    """`program` is the Python of an environment with torch and transformers."""

    name = "transformers"
    install = "python3 -m venv tf; tf/bin/pip install torch transformers; --peer transformers=tf/bin/python"
    formats = ("bfloat16", "float32")
    module = "dev.benchmarks.peers.hugging_face"


class Model:
    """A model and its tokenizer. A request gets exactly the tokens that it asks for, greedily."""

    def __init__(self, order: Order) -> None:
        torch = importlib.import_module("torch")
        if order.threads:
            torch.set_num_threads(order.threads)
        transformers = importlib.import_module("transformers")
        dtype = getattr(torch, order.format)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(order.model, dtype=dtype).eval()
        # AutoTokenizer guesses a class from config.json and may split the text in another way.
        file = str(Path(order.model) / "tokenizer.json")
        self.tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(file)

    def ids(self, requests: Requests) -> Burst:
        return [(self.tokenizer.encode(prompt, add_special_tokens=False).ids, tokens) for prompt, tokens in requests]

    def static(self, requests: Requests) -> int:
        static(self.model, self.ids(requests))
        return sum(tokens for _, tokens in requests)

    def continuous(self, requests: Requests) -> int:
        with continuous(self.model, max(tokens for _, tokens in requests)) as manager:
            return answers(manager, self.ids(requests))


def static(model: Any, burst: Burst, most: int = 0, cache: str | None = None) -> None:
    """Answer as one batch, padded on the left, with up to `most` tokens; a static cache is compiled on a GPU."""
    torch = importlib.import_module("torch")
    longest = max(len(ids) for ids, _ in burst)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in burst], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in burst], device=model.device)
    most = most or max(tokens for _, tokens in burst)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=None, max_new_tokens=most,
            min_new_tokens=most, cache_implementation=cache,
        ).cpu()  # fmt: skip


def continuous(model: Any, most: int) -> Any:
    """Return a context of transformers' own continuous batching, whose manager answers with up to `most` tokens."""
    new_config = importlib.import_module("transformers").GenerationConfig
    config = new_config(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=most)
    return model.continuous_batching_context_manager(generation_config=config)


def answers(manager: Any, burst: Burst, name: str = "request") -> int:
    """Return the number of tokens of all answers. RuntimeError when it takes too long."""
    for i, (ids, count) in enumerate(burst):
        manager.add_request(ids, request_id=f"{name}{i}", max_new_tokens=count)
    done = tokens = 0
    end = time.monotonic() + LIMIT
    while done < len(burst):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            done, tokens = done + 1, tokens + len(result.generated_tokens)
        elif time.monotonic() > end or not manager.is_running():
            raise RuntimeError(f"{done} of {len(burst)} answers")
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
