"""The schemas of requests in TGI's dialect; some of its bounds differ from OpenAI's."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.forms import TgiGrammar
from api.schemas.scheduling_hints import SchedulingHints

Fraction = Annotated[float, Field(allow_inf_nan=False, gt=0, lt=1), f.NUMBER]
FRACTION = "a number above 0 and below 1; leave it out for no limit"
STOP_LIST = f"a list of at most {f.MOST_STOPS} strings, each of 1 to {f.LONGEST_STOP} characters"
PARAMETERS = 'an object such as {"max_new_tokens": 20}'


class GenerateParameters(SchedulingHints):
    """Generation parameters."""

    unsupported: ClassVar = u.TGI

    temperature: f.Above0 | None = Field(None, description="a number above 0; leave it out for greedy decoding")
    repetition_penalty: f.Above0 | None = Field(None, description="a number above 0")
    frequency_penalty: f.Penalty | None = Field(None, description=f.PENALTY)
    top_k: f.Count | None = Field(None, description="a whole number of candidates, at least 1")
    top_p: Fraction | None = Field(None, description=FRACTION)
    typical_p: Fraction | None = Field(None, description=FRACTION)
    do_sample: f.Flag = Field(False, description=f.FLAG)
    max_new_tokens: f.Length | None = Field(None, description="a whole number of tokens to generate, at least 1")
    return_full_text: f.Flag = Field(False, description=f.FLAG)
    stop: f.StopList | None = Field(None, description=STOP_LIST)
    stop_sequences: f.StopList | None = Field(None, description=STOP_LIST)
    truncate: f.Count | None = Field(None, description=f.KEPT_TOKENS)
    details: f.Flag = Field(False, description=f.FLAG)
    decoder_input_details: f.Flag = Field(False, description=f.FLAG)
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 64), f.INTEGER] | None = Field(
        None, description="a whole number from 0 to 2^64 - 1"
    )
    top_n_tokens: Annotated[int, Field(strict=True, ge=1, le=5), f.INTEGER] | None = Field(
        None, description="a whole number from 1 to 5"
    )
    watermark: f.Off = Field(False, description="false, or leave it out")
    grammar: TgiGrammar = Field(
        None, description='an object such as {"type": "json", "value": {...}} or {"type": "regex", "value": "[0-9]+"}'
    )
    adapter_id: f.Adapter | None = Field(None, description=f.ADAPTER)


class GenerateRequest(u.Refusing):
    """POST /generate. Beside `parameters`, its fields have no effect."""

    unsupported: ClassVar = {
        name: u.EVERYWHERE[name] for name in u.EVERYWHERE.keys() - GenerateParameters.model_fields.keys() | {"grammar"}
    }

    inputs: f.Text = Field(description=f.PROMPT)
    parameters: GenerateParameters | None = Field(None, description=PARAMETERS)


class CompatRequest(GenerateRequest):
    """POST /, where the body chooses whether to stream."""

    stream: f.Flag = Field(False, description=f.FLAG)
