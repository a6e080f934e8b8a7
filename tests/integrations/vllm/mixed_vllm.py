"""Run with vLLM's Python, in the root: requests of all kinds in vLLM with a real model, few blocks, and policies switched live.

Streams, aborts, answers after a pattern, n = 2 and priorities, on the built-in model on the CPU, in one process, so that no step
depends on time. Then requests with adapters, without a model: never more of them in a step than vLLM may load.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from integrations.vllm.mocked_vllm import Mocked
from integrations.vllm.scheduler import PolicyScheduler

SWITCHES = ("dynamic+sjf", "static", "dynamic+vtc")
MOST_STEPS = 200  # for each request


def mixed(number: int, folder: str) -> None:
    """Serve this many requests; each that is not aborted must be answered, and all blocks must come back."""
    record = Path(folder, "steps.jsonl")
    os.environ["EB_VLLM"] = json.dumps({"policy": "dynamic+vtc", "record": str(record)})
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            "weights/bard", dtype="float32", max_model_len=256, max_num_seqs=8, num_gpu_blocks_override=18, enforce_eager=True,
            kv_cache_memory_bytes=1 << 27, max_num_batched_tokens=256, scheduler_cls="integrations.vllm.scheduler.PolicyScheduler", scheduling_policy="fcfs", block_size=32,
        )
    )  # fmt: skip
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free, rng = pool.get_num_free_blocks(), random.Random(5)
    tokens, ended, aborted = Counter[tuple[str, int]](), set[str](), set[str]()
    patterned, deltas, steps, switched, waiting = set[str](), set[str](), 0, list[str](), list(range(number))
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < 24:
            i = waiting.pop(0)
            kind = StructuredOutputsParams(choice=["yes", "no"]) if i % 5 == 0 else None
            params = SamplingParams(
                n=2 if i % 7 == 0 else 1, max_tokens=rng.randrange(1, rng.choice((12, 12, 12, 150))), temperature=1.0, structured_outputs=kind,
                output_kind=rng.choice(list(RequestOutputKind)), extra_args={"client": "ab"[i % 2]},
            )  # fmt: skip
            engine.add_request(
                f"r{i}",
                {"prompt_token_ids": [rng.randrange(5, 4000) for _ in range(rng.randrange(1, 90))]},
                params,
                priority=i % 3,
            )
            patterned |= {f"r{i}"} if kind else set()
            deltas |= {f"r{i}"} if params.output_kind is RequestOutputKind.DELTA else set()
            if i % 10 == 9:
                aborted.add(id := f"r{rng.randrange(i - 9, i + 1)}")
                engine.abort_request([id])
            if i % (number // 4) == number // 4 - 1 and len(switched) < len(SWITCHES):
                switched.append(SWITCHES[len(switched)])
                Path(f"{record}.policy").write_text(json.dumps({"policy": switched[-1]}), "utf-8")
                scheduler.record._looks_at = 0.0  # at once
        for one in engine.step():
            for choice in one.outputs:
                answer = one.request_id, choice.index
                tokens[answer] = (tokens[answer] if one.request_id in deltas else 0) + len(choice.token_ids)
            ended |= {one.request_id} if one.finished else set()
        steps += 1
        assert steps < MOST_STEPS * number, (
            f"{engine.get_num_unfinished_requests()} requests are not answered after {steps} steps"
        )
    engine.step()  # the last step's ends reach the policy
    missing = {f"r{i}" for i in range(number)} - ended - aborted
    assert not missing, f"{sorted(missing)} have no answer"
    assert pool.get_num_free_blocks() == free, f"{free - pool.get_num_free_blocks()} blocks do not come back"
    assert scheduler.plans is not None
    assert not scheduler.faults, scheduler.faults
    assert not scheduler.views, scheduler.views
    longest = max(count for (id, _), count in tokens.items() if id in patterned)
    assert longest <= 4, "an answer does not follow its pattern"  # three letters and the end
    lines = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    assert [line["switch"]["policy"] for line in lines if "switch" in line] == list(SWITCHES)
    preempted = sum(len(line.get("displaced", ())) for line in lines)
    print(
        f"{number:,} requests in {steps:,} steps: {len(aborted)} aborted, {preempted} preempted, all blocks back",
        flush=True,
    )


def adapters() -> None:
    """Serve requests with three adapters where a step may have one."""
    for ahead in (False, True):
        os.environ["EB_VLLM"] = json.dumps({"policy": "dynamic+vtc"})
        mocked = Mocked(PolicyScheduler, ahead=ahead)
        mocked.scheduler.lora_config = SimpleNamespace(max_loras=1)
        names = {f"r{i}": i % 4 for i in range(40)}  # 0: the model alone
        for id, i in names.items():
            lora = LoRARequest(f"adapter-{i}", i, "/none") if i else None
            mocked.add(id, [i, 2, 3], 5, lora_request=lora, extra={"client": "ab"[i % 2]})
        for _ in range(MOST_STEPS * len(names)):
            output, _ = mocked.plan()
            assert len({names[id] for id in output.num_scheduled_tokens} - {0}) <= 1, output.num_scheduled_tokens
            mocked.compute()
            if mocked.is_over:
                break
        assert mocked.ended == dict.fromkeys(names, "length")
        assert mocked.scheduler.plans is not None
        assert not mocked.scheduler.faults
    print("adapters: all requests are answered, with one adapter in each step", flush=True)


if __name__ == "__main__":
    adapters()
    with tempfile.TemporaryDirectory() as folder:
        mixed(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, folder)
