"""What requests in TGI's dialect may say; its bounds differ from OpenAI's here and there."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.schemas import fields as f
from api.schemas.scheduling_hints import SchedulingHints

Fraction = f.number(gt=0, lt=1)
FRACTION = "a number above 0 and below 1; leave it out for no limit"
STOP_LIST = f"a list of at most {f.MOST_STOPS} strings, each of 1 to {f.LONGEST_STOP} characters"


ONE = {"enum": [None, 1]}
DRAWS: list[dict[str, Any]] = [{"required": ["do_sample"], "properties": {"do_sample": {"const": True}}}] + [
    {"required": [name], "properties": {name: {"type": "number"}}}
    for name in ("temperature", "top_k", "top_p", "typical_p")
]
BEST_OF_DRAWS = {
    "anyOf": [{"properties": {"best_of": ONE}}, {"properties": {"seed": {"type": "null"}}, "anyOf": DRAWS}]
}
STREAMS = {"properties": {"best_of": ONE, "decoder_input_details": {"enum": [None, False]}}}


class GenerateParameters(SchedulingHints):
    """Generation parameters."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"allOf": [BEST_OF_DRAWS]})

    best_of: f.integer(ge=1, le=4) | None = Field(None, description="a whole number from 1 to 4")
    temperature: f.Above0 | None = Field(None, description="a number above 0; leave it out for greedy decoding")
    repetition_penalty: f.Above0 | None = Field(None, description="a number above 0")
    frequency_penalty: f.Penalty | None = Field(None, description=f.PENALTY)
    top_k: f.integer(gt=0, lt=1 << 31) | None = Field(None, description="a whole number of candidates, at least 1")
    top_p: Fraction | None = Field(None, description=FRACTION)
    typical_p: Fraction | None = Field(None, description=FRACTION)
    do_sample: f.Flag = Field(False, description=f.FLAG)
    max_new_tokens: f.integer(ge=1) | None = Field(None, description="a whole number of tokens to generate, at least 1")
    return_full_text: f.Flag = Field(False, description=f.FLAG)
    stop: f.StopList | None = Field(None, description=STOP_LIST)
    stop_sequences: f.StopList | None = Field(None, description=STOP_LIST)
    truncate: f.integer(ge=1, lt=1 << 31) | None = Field(
        None, description="a whole number of tokens to keep, at least 1"
    )
    watermark: Literal[False] = Field(False, description="false, or leave it out")
    details: f.Flag = Field(False, description=f.FLAG)
    decoder_input_details: f.Flag = Field(False, description=f.FLAG)
    seed: f.integer(ge=0, lt=1 << 64) | None = Field(None, description="a whole number from 0 to 2^64 - 1")
    top_n_tokens: f.integer(ge=1, le=5) | None = Field(None, description="a whole number from 1 to 5")


class GenerateRequest(BaseModel):
    """POST /generate."""

    model_config = ConfigDict(extra="ignore")

    inputs: f.Text = Field(description=f.PROMPT)
    parameters: GenerateParameters | None = Field(None, description='an object such as {"max_new_tokens": 20}')


class StreamParameters(GenerateParameters):
    """Generation parameters of a stream: one answer, without details of the prompt."""

    model_config = ConfigDict(json_schema_extra={"allOf": [STREAMS]})


class StreamRequest(GenerateRequest):
    """POST /generate_stream."""

    parameters: StreamParameters | None = Field(None, description='an object such as {"max_new_tokens": 20}')


class CompatRequest(GenerateRequest):
    """POST /, where the body chooses whether to stream."""

    stream: f.Flag = Field(False, description=f.FLAG)


UNSUPPORTED_PARAMETERS = {"watermark": (False,), "grammar": (), "adapter_id": ()}
