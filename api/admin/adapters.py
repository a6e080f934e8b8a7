"""vLLM's routes that load and unload LoRA adapters while requests run, and the description of adapters in /info.

They are off unless the server was started with --adapter-folder, and read nothing outside of these folders. The adapter is
read in the handler's thread; the loop does not wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flask import Response, request
from pydantic import BaseModel, Field

from api.generation import adapter_refusal, ready_engine
from api.http.errors import ApiError, shown
from api.http.openapi import Routes
from api.schemas import body
from api.schemas import fields as f
from api.service import LoadedEngine, Service
from serving.adapters import AdapterError, AdapterStore


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: f.Adapter = Field(description="a name for the adapter")
    lora_path: f.Text = Field(description="a folder below one of --adapter-folder")
    load_inplace: f.Flag = Field(False, description=f.FLAG)


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: f.Adapter = Field(description=f.ADAPTER)


EXAMPLE = {"lora_name": "comedies", "lora_path": "weights/bard-comedies"}
BODY = '{"lora_name": "comedies", "lora_path": "weights/bard-comedies"}'


def routes_of(service: Service) -> Routes:
    """Return the routes."""
    routes = Routes("adapters", "openai")

    @routes.post(
        "/v1/load_lora_adapter", "load a LoRA adapter from a folder that --adapter-folder allows",
        body=LoadAdapterRequest, example=EXAMPLE, answer={"text/plain": str}, errors=(404, 429, 503),
    )  # fmt: skip
    def load() -> Response:
        store = _store(service)
        params, ignored = body.validate(LoadAdapterRequest, body.take(request, BODY))
        try:
            store.check_name(params.lora_name)
        except AdapterError as error:
            raise adapter_refusal(error, "lora_name") from None
        folder = _allowed(service, params.lora_path)
        try:
            store.add(params.lora_name, str(folder), replace=params.load_inplace)
        except AdapterError as error:
            raise adapter_refusal(error, "lora_name" if error.problem == "exists" else "lora_path") from None
        return _said(f"Success: LoRA adapter '{params.lora_name}' added successfully.", ignored)

    @routes.post(
        "/v1/unload_lora_adapter", "unload a LoRA adapter; requests that have it go on", body=UnloadAdapterRequest,
        example={"lora_name": "comedies"}, answer={"text/plain": str}, errors=(404, 503),
    )  # fmt: skip
    def unload() -> Response:
        store = _store(service)
        params, ignored = body.validate(UnloadAdapterRequest, body.take(request, '{"lora_name": "comedies"}'))
        try:
            store.remove(params.lora_name)
        except AdapterError as error:
            raise adapter_refusal(error, "lora_name") from None
        return _said(f"Success: LoRA adapter '{params.lora_name}' removed successfully.", ignored)

    return routes


def _store(service: Service) -> AdapterStore:
    """Return the adapters, or raise 403 where they must not be changed."""
    store = ready_engine(service).adapters
    if store is None or not service.config.adapter_folders:
        raise ApiError(
            "this server does not load or unload adapters on request. Start it with --adapter-folder FOLDER",
            type="permission_error",
        )
    return store


def _allowed(service: Service, path: str) -> Path:
    """Return the folder at `path`, links resolved; raise ApiError unless it is within an allowed one."""
    try:
        folder = Path(path).resolve()
        inside = any(folder.is_relative_to(allowed.resolve()) for allowed in service.config.adapter_folders)
        if inside and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):  # a null byte, a name that is too long, a loop of links
        inside = False
    reason = "does not exist" if inside else "is not below a folder of --adapter-folder"
    raise ApiError(
        f"lora_path {shown(path)} {reason}. Use a folder there with adapter_config.json and adapter_model.safetensors",
        type="not_found_error" if inside else "permission_error", param="lora_path",
    )  # fmt: skip


def _said(text: str, ignored: list[str]) -> Response:
    return body.name_ignored(Response(text, mimetype="text/plain"), ignored)


def listed(engine: LoadedEngine) -> list[dict[str, Any]]:
    """Return the description of each adapter in /info."""
    store = engine.adapters
    if store is None:
        return []
    return [
        {"id": entry.name, "rank": entry.rank, "bytes": entry.nbytes, "in_memory": entry.loaded is not None}
        for entry in store.entries()
    ]
