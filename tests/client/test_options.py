"""Options: where a value comes from, what is rejected and how, and what --help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client import client, compare, top
from terminal import options
from terminal.options import Argument, Choice, Command, Number, OnOff, Option, Size, UsageError, Values

COMMAND = Command(
    "tool", "Do it.\n\n\b\n  an example", {
        "arguments": [Argument("what", "what to do", nargs=-1, default=[])],
        "first": [
            Option("--load", "loads", several=True),
            Option("--sizes", "sizes", Number(0), several=True, default=[1, 2]),
            Option("--pair", "may be repeated", repeat=True, default=[], envvar="EB_PAIR"),
            Option("--port", "port to use", Number(1, 65535), default=8500, envvar=["EB_PORT", "PORT"]),
        ],
        "second": [
            Option("--rate", "requests per second", options.POSITIVE),
            Option("--mode", "mode", Choice(["fast", "slow"]), default="fast"),
            Option("--cache", "share pages", OnOff(), default=True, envvar="EB_CACHE"),
            Option("--memory", "bytes", Size(), default=0),
            Option("--key", "key", options.KEY, envvar="EB_KEY"),
            Option("--stream/--no-stream", "stream", None, default=True),
            Option("--quick", "be quick", None),
            Option("--secret-flag", "not shown", hidden=True),
        ],
    }, {"loads": [("poisson:RATE", "exponential gaps")], "exit codes": "0 or 2."},
)  # fmt: skip


@pytest.fixture(autouse=True)
def _dotenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(line: str, environ: dict[str, str] | None = None, lines: dict[str, str] | None = None) -> Values:
    dotenv = Path(".env")
    dotenv.write_text("".join(f"{name}={text}\n" for name, text in (lines or {}).items()))
    return options.read(COMMAND, line.split(), environ, dotenv)


@pytest.mark.parametrize(
    ("line", "environ", "dotenv", "expected"),
    [
        # A flag takes several values up to the next flag, and a repeated flag one each time.
        ("a --load x y --port 9000 b --load z", {}, {}, {"load": ["x", "y", "z"], "what": ["a", "b"]}),
        ("--load=x b", {}, {}, {"what": ["b"]}),
        ("--pair a=1 b --pair c=2", {}, {}, {"pair": ["a=1", "c=2"], "what": ["b"]}),
        # What is absent has its default.
        ("", {}, {}, {"load": None, "sizes": [1, 2], "pair": [], "rate": None, "quick": False}),
        ("--no-stream --cache off", {}, {}, {"stream": False, "cache": False}),
        # A flag wins over the environment, and that over .env.
        ("--port 1", {"EB_PORT": "2"}, {"EB_PORT": "3"}, {"port": 1}),
        ("", {"PORT": "2"}, {"EB_PORT": "3"}, {"port": 2}),
        ("", {"EB_PORT": ""}, {"PORT": "3", "EB_PAIR": "x y"}, {"port": 3}),
        ("", {}, {"EB_PAIR": "x y"}, {"pair": ["x y"]}),
    ],
)
def test_a_value_comes_from_its_flag_then_its_variable_then_dotenv_then_its_default(
    line: str, environ: dict[str, str], dotenv: dict[str, str], expected: dict[str, Any]
) -> None:
    values = read(line, environ, dotenv)
    assert {name: getattr(values, name) for name in expected} == expected


def test_it_is_known_where_a_value_comes_from() -> None:
    assert not read("").is_given("port")
    assert read("--port 8500").is_given("port")
    assert read("", {}, {"EB_CACHE": "off"}).origin["cache"] == ".env"
    assert read("", {"EB_CACHE": "off"}).origin["cache"] == "environment"


def test_pairs_are_given_one_by_one_or_separated_by_commas() -> None:
    assert options.read_pairs(["a=1,b=x=y", "c=4,8"], "--pair") == {"a": "1", "b": "x=y", "c": "4,8"}
    with pytest.raises(UsageError, match="Use NAME=VALUE, as in --pair a=1"):
        options.read_pairs(["a"], "--pair")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--port 0", ["--port is '0'", "from 1 to 65,535"]),
        ("--port 1.5", ["--port is '1.5'", "whole number"]),
        ("--rate 0", ["--rate is '0'", "above 0"]),
        ("--rate nan", ["--rate is 'nan'", "above 0"]),
        ("--rate inf", ["--rate is 'inf'", "above 0"]),
        ("--sizes 3 x", ["--sizes is 'x'", "at least 0"]),
        ("--mode fsat", ["--mode is 'fsat'", "Did you mean 'fast'?", "fast, slow"]),
        ("--cache maybe", ["--cache is 'maybe'", "on or off"]),
        ("--memory 5X", ["--memory is '5X'", "512M"]),
        ("--memory lots", ["--memory is 'lots'", "512M"]),
        ("--memory inf", ["--memory is 'inf'", "512M"]),
        ("--rate soon", ["--rate is 'soon'", "above 0"]),
        ("--memory -1M", ["--memory is '-1M'", "at least 0"]),
        ("--laod x", ["'--laod'", "Did you mean '--load'?", "tool --help"]),
        ("--what x", ["'--what'", "tool --help"]),
        ("--port", ["'--port' requires an argument", "tool --help"]),
        ("--load --quick", ["'--load' requires an argument"]),
        ("--port --quick", ["'--port' requires an argument"]),
        ("--quick=1", ["'--quick' does not take a value"]),
    ],
)
def test_an_error_names_the_option_the_value_and_the_remedy(line: str, named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    message = str(caught.value)
    assert "\n" not in message
    assert all(words in message for words in named), message


@pytest.mark.parametrize(
    ("line", "environ", "dotenv", "words"),
    [
        ("", {"EB_PORT": "x"}, {}, "^EB_PORT is 'x'"),
        ("", {}, {"EB_PORT": "x"}, "^EB_PORT is 'x'"),
        ("", {"EB_KEY": "hunter2\u00ef"}, {}, "EB_KEY"),
        ("--kye=hunter2", {}, {}, "--kye"),
    ],
)
def test_an_error_names_the_variable_that_has_the_value_and_shows_no_secret(
    line: str, environ: dict[str, str], dotenv: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read(line, environ, dotenv)
    assert "hunter2" not in str(caught.value)


def test_help_has_defaults_bounds_and_variables_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "--port N port to use [8500, 1..65535; EB_PORT]" in words
    assert "--cache on|off share pages [on; EB_CACHE]" in words
    assert "--sizes N ... sizes [1 2, 0..]" in words
    assert "\n  an example\n" in text
    assert "poisson:RATE exponential gaps" in words
    assert "--secret-flag" not in words


@pytest.mark.parametrize(
    "command", [client.build_command(), compare.build_command(), top.COMMAND], ids=lambda command: command.name
)
def test_the_help_of_the_client_fits_80_columns(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.read(command, ["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
