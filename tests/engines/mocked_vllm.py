"""A scheduler class of vLLM without a model: requests come, steps are computed by nobody, tokens are invented.

With `ahead`, each step is planned before the one before it has its tokens, as vLLM does on a GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 8192}  # fmt: skip


class Mocked:
    """`scheduler` with slots, tokens of a step, and `blocks` of `size` tokens; `ended` are the answers that are complete."""

    def __init__(
        self, cls: type[Any], slots: int = 4, tokens: int = 64, blocks: int = 64, size: int = 16, *, caching: bool = True,
        ahead: bool = False, policy: str = "fcfs",
    ) -> None:  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODEL), "utf-8")
            model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=8192)
        scheduling = SchedulerConfig(
            max_num_seqs=slots, max_num_batched_tokens=tokens, max_model_len=8192, enable_chunked_prefill=True, is_encoder_decoder=False,
            async_scheduling=ahead, policy=policy, watermark=0.0,
        )  # fmt: skip
        cache = CacheConfig(block_size=size, enable_prefix_caching=caching)
        cache.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=model, scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu")
        )
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(size, sha256)
        self.scheduler = cls(
            vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config), block_size=size,
            log_stats=False,
        )  # fmt: skip
        self._depth, self._open = 1 + ahead, deque[Any]()
        self.ended: dict[str, str] = {}
        self.steps: list[dict[str, int]] = []

    def add(self, id: str, prompt: list[int], tokens: int, **more: Any) -> None:
        """Send a request whose answer has so many tokens."""
        extra = more.pop("extra", None)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(Request(id, prompt, params, None, block_hasher=self._hasher, **more))

    def abort(self, id: str) -> None:
        """Let a request's client leave."""
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def step(self) -> dict[str, int]:
        """Compute a step; return the tokens of each request in it."""
        output = self.scheduler.schedule()
        self._open.append((output, {id: self._due(id) for id in output.num_scheduled_tokens}))
        if len(self._open) >= self._depth:
            self._update(*self._open.popleft())
        self.steps.append(dict(output.num_scheduled_tokens))
        return self.steps[-1]

    def _due(self, id: str) -> bool:
        request = self.scheduler.requests[id]
        return bool(request.num_computed_tokens >= request.num_tokens + max(0, request.num_output_placeholders - 1))

    def _update(self, output: Any, due: dict[str, bool]) -> None:
        rows = list(output.num_scheduled_tokens)
        sampled = [[7] if due[id] else [] for id in rows]
        outputs = self.scheduler.update_from_output(
            output, ModelRunnerOutput(rows, {id: i for i, id in enumerate(rows)}, sampled)
        )
        for one in (one for some in outputs.values() for one in some.outputs):
            self.ended |= {one.request_id: str(one.finish_reason)} if one.finish_reason is not None else {}

    def run(self, steps: int = 1000) -> int:
        """Run until nothing is left; return the number of steps."""
        for number in range(steps):
            if not self.scheduler.has_requests():
                while self._open:
                    self._update(*self._open.popleft())
                return number
            self.step()
        return steps
