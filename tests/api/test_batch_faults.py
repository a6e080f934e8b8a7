"""What goes wrong while files and batches are stored and computed: full disks, ends at any moment, strange input."""

from __future__ import annotations

import pytest
from calls import error
from test_batches import World, upload
from test_batches import world as world


@pytest.mark.parametrize("name", ["at 3.21\u202fPM.jsonl", "\u3000.jsonl", "\U0001f468\u200d\U0001f469", "../\u202ea"])
def test_a_file_name_without_control_characters_is_kept(world: World, name: str) -> None:
    sent = upload(world, b"x", name).get_json()
    assert sent["filename"] == name
    assert world.app.test_client().get(f"/v1/files/{sent['id']}/content", buffered=True).status_code == 200


def test_no_field_of_an_upload_is_ignored_silently(world: World) -> None:
    assert upload(world, b"x", other="1").headers["X-Ignored-Params"] == "other"
    refused = upload(world, b"x", expires_after='{"anchor": "created_at", "seconds": 3600}')
    assert error(refused)["param"] == "expires_after"
