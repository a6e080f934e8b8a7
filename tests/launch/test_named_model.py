"""The name of a model in the place of the policy."""

from __future__ import annotations

import re

import pytest

import policies
from config import ConfigError, load
from launch import command
from models.sources import catalog
from tests.support import ROOT


def read(*argv: str, **environ: str) -> tuple[str, str]:
    config = command._with_named_model(load(argv, environ)).config
    return config.policy, config.model


@pytest.mark.parametrize("name", [*catalog.NAMES, "mock:llm-mock"])
def test_a_model_is_served_with_dynamic(name: str) -> None:
    assert read(name) == ("dynamic", name)
    assert read("demo", name, EB_MODEL="gpt2") == ("dynamic", name)


def test_only_the_command_line_may_name_it_and_a_policy_of_that_name_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read("static") == ("static", "")
    assert read(BATCHING="smollm2") == ("smollm2", "")
    monkeypatch.setattr(policies, "names", lambda: ["bard"])
    assert read("bard", "--model", "gpt2") == ("bard", "gpt2")


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'smollm2' and --model 'bard' both name a model\. Use one"):
        read("smollm2", "--model", "bard")


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy or model 'smolm2'\. Did you mean 'smollm2'\?"):
        read("smolm2")
    assert read("dinamic") == ("dinamic", "")  # its error names the nearest policy


def test_the_installer_knows_the_same_names() -> None:
    line = re.search(r"^ +(gpt2 .*) \| mock:\*\)", (ROOT / "dev/tools/setup.sh").read_text(), re.MULTILINE)
    assert line is not None
    assert set(line[1].split(" | ")) == set(catalog.NAMES)
