"""A vLLM scheduler class without a model: it gets real requests, and made-up tokens for each step that it schedules.

With `ahead`, each step is planned before the one before it has its tokens, as vLLM does on a GPU. This module must not know
laws or policies.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, deque
from functools import cache
from pathlib import Path
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

CONTEXT = 8192
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": CONTEXT}


@cache
def _model() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), "utf-8")
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=CONTEXT)


class Mocked:
    """`scheduler` with slots, tokens of a step, and blocks; `tokens` are how many each request has, `ended` why answers ended."""

    def __init__(
        self, cls: type[Any], slots: int = 4, tokens: int = 64, blocks: int = 64, size: int = 16, *, caching: bool = True,
        ahead: bool = False, policy: str = "fcfs", chunked: bool = True,
    ) -> None:  # fmt: skip
        caches = CacheConfig(block_size=size, enable_prefix_caching=caching)
        caches.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=_model(), cache_config=caches, device_config=DeviceConfig("cpu"), scheduler_config=SchedulerConfig(
                max_num_seqs=slots, max_num_batched_tokens=tokens, max_model_len=CONTEXT if chunked else tokens, policy=policy,
                enable_chunked_prefill=chunked, async_scheduling=ahead, is_encoder_decoder=False, watermark=0.0,
            ),
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=_model().dtype)
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(size, sha256)
        grammars = StructuredOutputManager(config)
        self.scheduler = cls(config, kv, structured_output_manager=grammars, block_size=size, log_stats=False)
        self._depth, self._open = 1 + ahead, deque[Any]()
        self.ended, self.tokens = dict[str, str](), Counter[str]()

    def add(self, id: str, prompt: list[int], tokens: int, **more: Any) -> None:
        """Add a request whose answer ends after `tokens` tokens."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=more.pop("extra", None))
        self.scheduler.add_request(Request(id, prompt, params, None, block_hasher=self._hasher, **more))

    def abort(self, id: str) -> None:
        """Let a request's client leave."""
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def is_over(self) -> bool:
        """Whether no request is left, and no step is still being computed."""
        return not self._open and not self.scheduler.has_requests()

    def plan(self) -> tuple[Any, list[str]]:
        """Plan a step; return it, and the requests that get a token in it."""
        output = self.scheduler.schedule()
        rows = [self.scheduler.requests[id] for id in output.num_scheduled_tokens]
        known = [row.num_tokens + max(0, row.num_output_placeholders - 1) for row in rows]
        due = [row.request_id for row, tokens in zip(rows, known) if row.num_computed_tokens >= tokens]
        self._open.append((output, due))
        return output, due

    def compute(self) -> None:
        """Give vLLM the tokens of the oldest step, unless it may plan another one before; of all steps if no request is left."""
        while len(self._open) >= self._depth or (self._open and not self.scheduler.has_requests()):
            output, due = self._open.popleft()
            rows = list(output.num_scheduled_tokens)
            sampled = [[7] if id in due else [] for id in rows]
            result = ModelRunnerOutput(rows, {id: i for i, id in enumerate(rows)}, sampled)
            for some in self.scheduler.update_from_output(output, result).values():
                for one in some.outputs:
                    self.tokens[one.request_id] += len(one.new_token_ids)
                    self.ended |= {one.request_id: str(one.finish_reason)} if one.finish_reason is not None else {}
