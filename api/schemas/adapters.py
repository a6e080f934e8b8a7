"""The schemas of requests that load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

from pydantic import BaseModel, Field

from api.schemas import fields as f


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter."""

    lora_name: f.Adapter = Field(description="a name for the adapter")
    lora_path: f.Text = Field(description="a folder below one of --adapter-folder")
    load_inplace: f.Flag = Field(False, description=f.FLAG)


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: f.Adapter = Field(description=f.ADAPTER)
