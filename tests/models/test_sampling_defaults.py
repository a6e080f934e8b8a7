"""The sampling values that a model's authors recommend: in a folder, in a GGUF file, or nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models import sampling_defaults
from models.sources.checkpoint import CheckpointError
from tests.support import gguf


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_a_folder_names_its_values_and_what_it_leaves_out_is_not_chosen(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature=0.6, top_k=20, top_p=None, do_sample=True, eos_token_id=[2, 0], max_length=20)
    assert sampling_defaults.read(folder) == {"temperature": 0.6, "top_k": 20}


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}', "utf-8-sig")
    assert sampling_defaults.read(tmp_path) == {"top_k": 20}


def test_a_model_without_the_file_or_without_weights_recommends_nothing(tmp_path: Path) -> None:
    assert sampling_defaults.read(tmp_path) == {}
    assert sampling_defaults.read(None) == {}


@pytest.mark.parametrize(
    "values",
    [{"temperature": "hot"}, {"temperature": -1}, {"temperature": True}, {"top_k": 1.5}, {"top_p": 0}, {"min_p": 2},
     {"repetition_penalty": float("inf")}],
    ids=repr,
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_named(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(values))):
        sampling_defaults.read(write(tmp_path, **values))


def test_a_gguf_file_names_its_values_in_its_metadata(tmp_path: Path) -> None:
    path = gguf.write(tmp_path / "tiny.gguf", "llama", {"general.sampling.temp": 0.6, "general.sampling.top_k": 40}, {})
    assert sampling_defaults.read(path) == {"temperature": 0.6, "top_k": 40}
