"""OpenAI's files and batches: work that is computed while nothing else is, and survives restarts."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from flask import Response, jsonify, request, send_file
from pydantic import Field, StrictStr

from api.dialects import uploads
from api.http import errors
from api.http.errors import ApiError, shown
from api.http.openapi import Routes, TypedDict
from api.http.owner import current_owner
from api.schemas import body
from api.schemas import fields as f
from api.schemas import unsupported as u
from api.service import Service
from batch_files.runner import Runner
from batch_files.store import InUse, Row

EXAMPLE = '{"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'
SENT = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
log = logging.getLogger("effective-batching")
MOST_OPEN = 100  # batches of an API key
MOST_LISTED = {"file": 10_000, "batch": 100}
TABLES = {"file": "files", "batch": "batches"}  # of the store, and the last part of the routes
SHOWN = (  # of a batch, as the store has it
    "id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id", "created_at",
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
BatchFile = TypedDict("BatchFile", {
    "id": str, "object": Literal["file"], "bytes": int, "created_at": int, "filename": str, "purpose": str,
    "status": str,
})  # fmt: skip
BatchFiles = TypedDict("BatchFiles", {"object": Literal["list"], "data": list[BatchFile], "has_more": bool})
DeletedFile = TypedDict("DeletedFile", {"id": str, "object": Literal["file"], "deleted": bool})
Batch = TypedDict("Batch", {
    "id": str, "object": Literal["batch"], "endpoint": str, "input_file_id": str, "completion_window": str,
    "status": str, "created_at": int, "output_file_id": str | None, "error_file_id": str | None,
    "request_counts": dict[str, int],
})  # fmt: skip
Batches = TypedDict("Batches", {"object": Literal["list"], "data": list[Batch], "has_more": bool})
Upload = TypedDict("Upload", {"file": bytes, "purpose": Literal["batch"]})
MOST_METADATA = 16
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Key = Annotated[StrictStr, Field(max_length=64)]
Value = Annotated[StrictStr, Field(max_length=512)]


class BatchRequest(u.Refusing):
    """POST /v1/batches: compute the requests of an uploaded file."""

    unsupported: ClassVar = {"output_expires_after": ()}

    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=128)] = Field(
        description="the id of a file that was uploaded with the purpose batch"
    )
    endpoint: Endpoint = Field(description='"/v1/chat/completions", "/v1/completions" or "/v1/embeddings"')
    completion_window: Annotated[StrictStr, Field(pattern=r"^[1-9][0-9]{0,2}h$")] = Field(
        description='a number of hours from 1h to 999h, such as "24h"'
    )
    metadata: Annotated[dict[Key, Value], Field(max_length=MOST_METADATA), f.at_most(MOST_METADATA)] | None = Field(
        None, description=f"at most {MOST_METADATA} strings by name"
    )


LISTED = {"after": str, "limit": Annotated[int, Field(ge=1, le=100)]}


def routes_of(service: Service) -> Routes:
    """Return the routes."""
    routes = Routes("batches", "batches")
    routes.blueprint.register_error_handler(sqlite3.Error, _unusable)
    routes.blueprint.register_error_handler(OSError, _unusable)
    _file_routes(routes, service)
    _batch_routes(routes, service)
    return routes


def _file_routes(routes: Routes, service: Service) -> None:
    @routes.post("/v1/files", "upload the requests of a batch", form=Upload, answer=BatchFile, errors=(404, 429, 503))
    def upload() -> Response:
        store = _runner(service).store
        if store.usage()[0] >= service.config.batch_files:
            raise ApiError(
                f"the server keeps {service.config.batch_files:,} files already. Delete some, or raise --batch-files",
                type="overloaded", retry_after=60,
            )  # fmt: skip
        sent = uploads.receive(request, store.path(""), service.config.batch_file_size)
        try:
            purpose = sent.fields.get("purpose")
            if purpose != "batch":
                raise ApiError(
                    f'purpose is {shown(purpose or "absent")}, but must be "batch". Use {uploads.EXAMPLE}',
                    param="purpose",
                )
            if expiry := next((name for name in sent.fields if name.startswith("expires_after")), None):
                raise ApiError(
                    f"{expiry} is not supported: --batch-retention is for all files. Leave it out", param=expiry
                )
            row = store.add_file(sent.path, current_owner(), sent.name, purpose)
            return body.name_ignored(jsonify(file_object(row)), (name for name in sent.fields if name != "purpose"))
        finally:
            sent.path.unlink(missing_ok=True)

    @routes.get(
        "/v1/files", "the files of this API key", answer=BatchFiles, errors=(400, 404),
        query={**LISTED, "order": Literal["asc", "desc"], "purpose": str},
    )  # fmt: skip
    def files() -> Response:
        newest_first = request.args.get("order", "desc") != "asc"
        return _listed(service, "file", file_object, newest_first, request.args.get("purpose", ""))

    @routes.get("/v1/files/<id>", "a file, without its content", answer=BatchFile, errors=(404,))
    def file(id: str) -> Response:
        return jsonify(file_object(_row(service, "file", id)))

    @routes.get("/v1/files/<id>/content", "the content of a file", answer={"application/jsonl": str}, errors=(404,))
    def content(id: str) -> Response:
        row = _row(service, "file", id)
        path = _runner(service).store.path(row["id"])
        if not path.is_file():
            raise _unknown("file", id)
        return send_file(path, mimetype="application/jsonl", download_name=row["filename"], as_attachment=True)

    @routes.delete("/v1/files/<id>", "delete a file", answer=DeletedFile, errors=(400, 404))
    def delete(id: str) -> Response:
        row = _row(service, "file", id)
        try:
            _runner(service).store.delete_file(row["id"], row["owner"])
        except InUse as error:
            raise ApiError(f"the file {id} is in use by {error}. Cancel the batch first, or wait for its end") from None
        return jsonify(id=id, object="file", deleted=True)


def _batch_routes(routes: Routes, service: Service) -> None:
    @routes.post(
        "/v1/batches", "compute the requests of a file while the server is idle", body=BatchRequest, example=SENT,
        answer=Batch, errors=(404,),
    )  # fmt: skip
    def create() -> Response:
        runner = _runner(service)
        params, ignored = body.validate(BatchRequest, body.take(request, EXAMPLE))
        row = _row(service, "file", params.input_file_id, "input_file_id")
        if row["purpose"] != "batch":
            raise _unknown("file", params.input_file_id, "input_file_id")
        hours = int(params.completion_window[:-1])
        batch = runner.store.add_batch(current_owner(), row["id"], params.endpoint, hours, params.metadata, MOST_OPEN)
        if batch is None:
            raise ApiError(
                f"this API key has {MOST_OPEN} batches that have not ended, and may have no more. Wait, or cancel some",
                type="overloaded", retry_after=60,
            )  # fmt: skip
        runner.wake()
        return body.name_ignored(jsonify(batch_object(batch)), ignored)

    @routes.get("/v1/batches", "the batches of this API key", answer=Batches, errors=(400, 404), query=LISTED)
    def batches() -> Response:
        return _listed(service, "batch", batch_object)

    @routes.get("/v1/batches/<id>", "a batch and its progress", answer=Batch, errors=(404,))
    def batch(id: str) -> Response:
        return jsonify(batch_object(_row(service, "batch", id)))

    @routes.post("/v1/batches/<id>/cancel", "cancel a batch; what is computed is kept", answer=Batch, errors=(404,))
    def cancel(id: str) -> Response:
        runner = _runner(service)
        runner.store.move(_row(service, "batch", id)["id"], "cancelling")
        runner.wake()
        return jsonify(batch_object(_row(service, "batch", id)))


def _unusable(error: Exception) -> Response:
    """Answer that the folder of files and batches cannot be used: its disk is full or fails, or it is read-only."""
    if isinstance(error, ConnectionError):  # of the client
        raise error
    reason = error.strerror if isinstance(error, OSError) else str(error)
    log.error("cannot use --batch-folder: %s", error)
    text = (
        f"the folder of files and batches cannot be used: {reason}. Free space in --batch-folder, or make it writable"
    )
    return errors.response(ApiError(text, type="unavailable_error", retry_after=60))


def _runner(service: Service) -> Runner:
    if service.batches is None:
        raise ApiError("batches are off. Start the server with --batch-folder FOLDER", type="not_found_error")
    return service.batches


def _row(service: Service, kind: Literal["file", "batch"], id: str, param: str | None = None) -> Row:
    """Return a file or a batch of the current owner; raise 404 if there is none."""
    row = _runner(service).store.row(TABLES[kind], id, current_owner())
    if row is None:
        raise _unknown(kind, id, param)
    return row


def _unknown(kind: str, id: str, param: str | None = None) -> ApiError:
    return ApiError(
        f"this API key has no {kind} {shown(id)}. GET /v1/{TABLES[kind]} lists what it has",
        type="not_found_error",
        param=param,
    )


def _listed(
    service: Service, kind: Literal["file", "batch"], written: Callable[[Row], dict[str, Any]], *options: Any
) -> Response:
    """Answer with the entries that the query asks for; the other options are those of `Store.rows`."""
    store, most = _runner(service).store, MOST_LISTED[kind]
    text, after = request.args.get("limit", "100"), request.args.get("after", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise ApiError(
            f"limit is {shown(text)}, but must be a whole number from 1 to {most:,}. Send one", param="limit"
        )
    if after:
        _row(service, kind, after, "after")
    limit = min(int(text), most)
    rows = store.rows(TABLES[kind], current_owner(), after, limit + 1, *options)
    page = [written(row) for row in rows[:limit]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return jsonify(object="list", data=page, first_id=first, last_id=last, has_more=len(rows) > limit)


def file_object(row: Row) -> dict[str, Any]:
    """Return a file in OpenAI's form."""
    fields = {name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose")}
    return {**fields, "object": "file", "status": "processed", "status_details": None, "expires_at": None}


def batch_object(row: Row) -> dict[str, Any]:
    """Return a batch in OpenAI's form."""
    return {
        **{name: row[name] for name in SHOWN},
        "object": "batch",
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        **{name: json.loads(row[name] or "null") for name in ("errors", "metadata")},
    }
