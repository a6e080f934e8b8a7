"""OpenVINO GenAI: its continuous batching, offline, on a model that its own tools convert."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

from dev.benchmarks.peers.peer import NotMeasured, OfflinePeer, Order, Requests, Serve, answer

WEIGHTS = {"bfloat16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "64"]}
CONVERT_SECONDS = 900


class OpenVINO(OfflinePeer):
    """`program` is the Python of an environment with openvino-genai and optimum-intel."""

    name = "openvino"
    install = (
        'python3 -m venv ov; ov/bin/pip install openvino-genai "optimum-intel[openvino]"; --peer openvino=ov/bin/python'
    )
    formats = tuple(WEIGHTS)
    module = "dev.benchmarks.peers.openvino"

    @property
    def converted(self) -> Path:
        return self.job.work / f"openvino-{self.job.checkpoint().name}-{self.format}"

    def model(self) -> str:
        return str(self.converted)

    def prepare(self) -> None:
        if (self.converted / "openvino_detokenizer.xml").exists():  # which is written last
            return
        command = [
            str(self.program.parent / "optimum-cli"), "export", "openvino", "--model", str(self.job.checkpoint()),
            "--task", "text-generation-with-past", "--weight-format", *WEIGHTS[self.format], str(self.converted),
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=CONVERT_SECONDS, cwd=self.job.work)
        except (OSError, subprocess.SubprocessError) as error:
            lines = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip().splitlines()
            raise NotMeasured(f"cannot convert the model: {lines[-1] if lines else error}") from error


def load(order: Order) -> Serve:
    """Return what answers requests by the pipeline. The model is the converted folder."""
    genai = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 2, order.slots  # GiB
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 256, True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": "bf16"}
    if order.threads:
        properties["INFERENCE_NUM_THREADS"] = str(order.threads)
    pipeline = genai.ContinuousBatchingPipeline(order.model, scheduler, "CPU", properties)

    def serve(requests: Requests) -> int:
        configs = []
        for _, tokens in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
            configs.append(config)
        pipeline.generate([prompt for prompt, _ in requests], configs)
        return sum(tokens for _, tokens in requests)

    return serve


if __name__ == "__main__":
    answer(load)
