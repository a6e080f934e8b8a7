"""The plain model and the original's names around it: three ways to the same text."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch

from generate.generate import dynamic_batch_generate, generate, generate_ids, static_batch_generate
from generate.params import SamplingParams
from model import GPT, DynamicBatchingServerModel, GPTConfig, ServerModel, load_base_model_config
from models.sources import catalog

CONFIG = GPTConfig(block_size=64, vocab_size=257, n_layer=3, n_head=2, n_embd=32)
SMALL = {"model_type": "gpt2", "n_positions": 64, "vocab_size": 257, "n_layer": 3, "n_head": 2, "n_embd": 32}
PROMPTS = {"To be": 9, "O": 17, "What's in a name? That which we call a rose": 4, "Hark!": 1}
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Job:
    """What the original calls an inference, without its event."""

    prompt: str
    num_tokens: int
    sampling: SamplingParams | None = None
    data: list[int] | None = None
    done: int = field(default=0)

    def add_token(self, token: int) -> bool:
        assert self.data is not None
        self.data.append(token)
        self.done += 1
        return self.done == self.num_tokens


@pytest.fixture(scope="module")
def served() -> DynamicBatchingServerModel:
    table = {bytes([byte]): byte for byte in range(256)}
    enc = tiktoken.Encoding("bytes", pat_str=".|\n", mergeable_ranks=table, special_tokens={"<|endoftext|>": 256})
    gpt = GPT(CONFIG)
    generator = torch.Generator().manual_seed(7)
    for parameter in gpt.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return DynamicBatchingServerModel(gpt.requires_grad_(False), enc, "cpu")


def test_the_packed_forward_gives_the_logits_of_each_sequence_alone(served: DynamicBatchingServerModel) -> None:
    rows = [torch.tensor(served.encode(prompt)) for prompt in PROMPTS]
    logits = served.batch_inference_forward(rows, [len(row) for row in rows])
    assert logits.shape == (4, 1, 257)
    for row, packed in zip(rows, logits):
        alone, _ = served.model(row[None])
        torch.testing.assert_close(packed, alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_the_packed_forward_scales_attention_as_the_model_does(changes: dict[str, Any]) -> None:
    torch.manual_seed(2)
    gpt = GPT(GPTConfig(**{**vars(CONFIG), **changes})).requires_grad_(False)
    row = torch.arange(20)
    packed = DynamicBatchingServerModel(gpt, None, "cpu").batch_inference_forward([row], [20])
    torch.testing.assert_close(packed, gpt(row[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_one_by_one_padded_and_packed_generation_give_the_same_text(
    served: DynamicBatchingServerModel, sampled: bool
) -> None:
    def jobs() -> list[Job]:
        how = [SamplingParams(0.9, seed=i) if sampled else None for i in range(len(PROMPTS))]
        return [Job(prompt, n, s) for (prompt, n), s in zip(PROMPTS.items(), how)]

    alone = [generate(job, served) for job in jobs()]
    batch = jobs()
    together = static_batch_generate(batch, served)
    assert [text for text, _ in together] == alone
    assert [job for _, job in together] == batch

    waiting = jobs()
    for job in waiting:
        job.data = served.encode(job.prompt)
    left: list[Job] = []
    steps = 0
    while waiting:
        finished, waiting = dynamic_batch_generate(waiting, served)
        left += finished
        steps += 1
    assert [job.num_tokens for job in left] == [1, 4, 9, 17]  # the shortest leaves first
    assert steps == 17
    assert sorted(served.decode(job.data or []) for job in left) == sorted(alone)


def test_a_generated_text_begins_with_its_prompt_and_has_the_requested_tokens(
    served: DynamicBatchingServerModel,
) -> None:
    job = Job("To be", 12, SamplingParams(1.0, seed=3))
    assert len(generate_ids(job, served)) == 12
    assert generate(job, served).startswith("To be")
    assert generate_ids(job, served) == generate_ids(job, served)
    other = Job("To be", 12, SamplingParams(1.0, seed=4))
    assert generate_ids(job, served) != generate_ids(other, served)


def test_an_empty_batch_gives_no_texts(served: DynamicBatchingServerModel) -> None:
    assert dynamic_batch_generate([], served) == ([], [])
    assert static_batch_generate([], served) == []


def test_more_tokens_than_the_context_holds_are_refused(served: DynamicBatchingServerModel) -> None:
    row = torch.zeros(65, dtype=torch.long)
    for forward in (lambda: served.model(row[None]), lambda: served.batch_inference_forward([row], [65])):
        with pytest.raises(ValueError, match=r"65 tokens exceed the context of 64\. Shorten"):
            forward()


def test_end_of_text_in_a_prompt_is_ordinary_text(served: DynamicBatchingServerModel) -> None:
    assert 256 not in served.encode("a<|endoftext|>")
    assert served.decode([97, 256]) == "a<|endoftext|>"


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of n_head"):
        GPTConfig(n_embd=30, n_head=4)
    with pytest.raises(ValueError, match="Use one of gelu_new"):
        GPTConfig(activation="mish")


def test_the_loss_is_counted_where_there_is_a_target() -> None:
    torch.manual_seed(0)
    gpt = GPT(CONFIG).requires_grad_(False)
    gpt.init_weights()
    ids = torch.randint(0, 257, (1, 8))
    targets = ids.clone()
    targets[0, :4] = -1
    logits, loss = gpt(ids, targets)
    expected = -logits.log_softmax(-1)[0, range(4, 8), ids[0, 4:]].mean()
    torch.testing.assert_close(loss, expected)


def test_a_window_at_a_position_uses_the_later_position_embeddings() -> None:
    torch.manual_seed(0)
    gpt = GPT(CONFIG).requires_grad_(False)
    gpt.init_weights()
    ids = torch.arange(5)[None]
    assert not torch.allclose(gpt.hidden(ids), gpt.hidden(ids, position=9))
    with pytest.raises(ValueError, match="exceed the context"):
        gpt.hidden(ids, position=60)


def test_the_original_loader_gives_model_tokenizer_and_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = tmp_path / "bytes.tiktoken"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    monkeypatch.setenv("EB_TOKENIZER_FILE", str(ranks))
    small = catalog.ResolvedModel("small", None, "dummy", None, None, SMALL, None, "no hub")
    monkeypatch.setattr(catalog, "resolve", lambda *args: small)
    gpt, enc, device = load_base_model_config(device="cpu")
    assert device == torch.device("cpu")
    served = ServerModel(gpt, enc, device)
    assert served.decode(served.encode("Größe")) == "Größe"
    assert len(generate_ids(Job("To be", 5), served)) == 5
