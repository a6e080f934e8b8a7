"""The schema of requests to /inference."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.scheduling_hints import SchedulingHints


class InferenceRequest(SchedulingHints):
    """The original project's request with its two fields, and optional extensions."""

    unsupported: ClassVar = u.NATIVE

    prompt: f.Text = Field(description=f.PROMPT)
    num_tokens: f.Digits = Field(description="a whole number of tokens to generate, at least 1")
    temperature: f.Temperature = Field(1.0, description=f.TEMPERATURE)
    top_k: f.TopK = Field(0, description=f.TOP_K)
    top_p: f.TopP = Field(1.0, description=f.TOP_P)
    seed: f.Int64 | None = Field(None, description=f.SEED)
    stop: f.Stops = Field([], description=f.STOP)
    ignore_eos: f.Flag = Field(True, description=f.FLAG)
    stream: f.Flag = Field(False, description=f.FLAG)
    adapter: f.Adapter | None = Field(None, description=f.ADAPTER)
    timeout_s: f.Seconds | None = Field(None, description=f.SECONDS)
