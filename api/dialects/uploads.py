"""Reading an uploaded file: multipart form data, written to the disk as it arrives, whatever its size.

This module must not know what the file is for.
"""

from __future__ import annotations

import re
import tempfile
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from flask import Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser
from werkzeug.wsgi import get_input_stream

from api.http.errors import ApiError, shown

REST = 1 << 16  # bytes of a form beside its file
MEMORY = 1 << 20  # that the parser may hold: a few of its reads of 64 KiB, which may have no line's end
NAME_LENGTH = 255
EXAMPLE = "curl -F purpose=batch -F file=@requests.jsonl"


class Upload(NamedTuple):
    """A file on the disk, its name at the client, and the other fields of the form."""

    path: Path
    name: str
    fields: dict[str, str]


def receive(request: Request, folder: Path, limit: int) -> Upload:
    """Write the file of a form with at most `limit` bytes to a new file in `folder`; raise ApiError."""
    if request.mimetype != "multipart/form-data" or "boundary" not in request.mimetype_params:
        raise ApiError(
            f"the content type is {shown(request.mimetype or 'absent')}, but must be multipart/form-data. Use {EXAMPLE}",
            status=415,
        )
    written: list[IO[bytes]] = []

    def create(*_: Any, **__: Any) -> IO[bytes]:
        written.append(tempfile.NamedTemporaryFile(dir=folder, prefix="upload-", delete=False))  # noqa: SIM115
        return written[-1]

    try:
        form, files = _parse(request, create, limit + REST)
        file = files.get("file")
        if file is None:
            raise ApiError(f"the form has no file. Use {EXAMPLE}", param="file")
        name = re.split(r"[/\\]", str(file.filename or ""))[-1]
        name = "".join(letter for letter in name if unicodedata.category(letter) != "Cc")[:NAME_LENGTH] or "file"
        path = Path(written[0].name)
        for other in written:
            other.close()
        if len(written) > 1:
            raise ApiError(f"the form has {len(written)} files, but must have one. Use {EXAMPLE}", param="file")
        if path.stat().st_size > limit:
            raise _too_large(limit)
        return Upload(path, name, {k: v[:NAME_LENGTH] for k, v in form.items()})
    except BaseException:
        for other in written:
            with suppress(OSError):  # what is left in its buffer does not fit on the disk
                other.close()
            with suppress(OSError):
                Path(other.name).unlink(missing_ok=True)
        raise


def _parse(request: Request, create: Callable[..., IO[bytes]], limit: int) -> tuple[Any, Any]:
    if (request.content_length or 0) > limit:
        raise _too_large(limit - REST)
    parser = FormDataParser(
        create, max_form_memory_size=MEMORY, max_content_length=limit, max_form_parts=20, silent=False
    )
    try:
        stream = get_input_stream(request.environ, max_content_length=limit)
        _, form, files = parser.parse(stream, request.mimetype, request.content_length, request.mimetype_params)
        return form, files
    except RequestEntityTooLarge:
        raise _too_large(limit - REST) from None
    except BlockingIOError:
        raise ApiError(
            "timed out while reading the file. Send it without pauses, or raise --receive-timeout",
            type="timeout_error", status=408,
        ) from None  # fmt: skip
    except ValueError:
        raise ApiError(f"the form is malformed or incomplete. Use {EXAMPLE}") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(
        f"the file is larger than {limit:,} bytes. Split it, or raise --batch-file-size", status=413, param="file"
    )
