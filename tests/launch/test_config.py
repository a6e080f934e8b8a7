"""The settings: where a value comes from, what is refused and how, what --help and --print-config show."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

import app
import config as settings
import policies
from config import Config, ConfigError, load
from launch import preflight

FIELDS = {item.name: item for item in dataclasses.fields(Config)}
NOTHING = Path(os.devnull)
OTHER: dict[str, tuple[str, Any]] = {
    "policy": ("static", "static"), "max_batch_size": ("7", 7), "max_tokens_per_step": ("99", 99),
    "max_queue": ("0", 0), "max_queue_tokens": ("2048", 2048), "request_timeout": ("2.5", 2.5), "model": ("gpt2", "gpt2"),
    "load_format": ("dummy", "dummy"), "device": ("cpu", "cpu"), "dtype": ("float32", "float32"),
    "quantize": ("int8", "int8"), "kv_dtype": ("int8", "int8"), "speculate": ("ngram", "ngram"), "drafts": ("2", "2"), "mock_acceptance": ("0.5", 0.5), "draft_model": ("bard", "bard"),
    "batch_invariant": ("on", True),
    "tokenizer_file": ("x.tiktoken", "x.tiktoken"), "kv_memory": ("1.5G", 3 << 29),
    "prefix_cache": ("off", False), "evict": ("ttl", "ttl"), "pinned_prefixes": ("x.json", "x.json"), "pinned_pages": ("7", 7), "compute_threads": ("3", 3), "host": ("::1", "::1"),
    "port": ("9000", 9000), "api_key": ("k", "k"), "queue_timeout": ("1.5", 1.5),
    "max_connections": ("2000", 2000), "overload_status": ("503", "503"),
    "access_log": ("off", False), "dashboard_show_text": ("on", True), "demo": ("on", True), "lab": ("on", True), "end_of_text": ("text", "text"),
    "policy_option": ("w_p=1", "w_p=1"), "receive_timeout": ("2.5", 2.5), "send_timeout": ("2.5", 2.5),
    "adapter": ("a=b", "a=b"), "adapter_folder": ("x", "x"), "adapter_memory": ("1M", 1 << 20),
    "dedup": ("per-key", "per-key"), "served_names": ("small,*", "small,*"), "mock_context": ("32768", 32768),
    "batch_folder": ("work", "work"), "batch_file_size": ("1M", 1 << 20), "batch_files": ("5", 5), "batch_lines": ("7", 7), "batch_width": ("3", 3),
    "batch_retention": ("2.5", 2.5), "front_ends": ("2", 2),
    "trusted_hosts": ("a.example", "a.example"),
    "cors_origins": ("https://a.example", "https://a.example"),
}  # fmt: skip
THIRD = {"policy": "nobatch", "port": "9001", "prefix_cache": "on", "load_format": "auto", "device": "cuda",
         "dtype": "bfloat16", "kv_memory": "7M", "max_connections": "999", "overload_status": "429",
         "access_log": "on", "demo": "off", "evict": "lru", "cors_origins": "*", "dashboard_show_text": "off", "end_of_text": "special"}  # fmt: skip


def read(*argv: str, lines: str = "", tmp_path: Path | None = None, **environ: str) -> settings.Loaded:
    path = NOTHING
    if tmp_path is not None:
        path = tmp_path / ".env"
        path.write_text(lines)
    return load(argv, environ, path)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, **environ)
    return str(caught.value)


def test_every_setting_has_a_flag_a_variable_and_a_help() -> None:
    assert set(OTHER) == set(FIELDS), "give a new setting a value in this test"
    assert settings.variable("max_batch_size") == "EB_MAX_BATCH_SIZE"
    assert settings.flag("max_batch_size") == "--max-batch-size"
    assert all(len(item.metadata["help"]) > 10 for item in FIELDS.values())
    assert Config().port == 8500
    assert Config().policy == "nobatch"


@pytest.mark.parametrize("name", OTHER)
def test_a_flag_wins_over_the_environment_and_that_over_dotenv(name: str, tmp_path: Path) -> None:
    text, value = OTHER[name]
    third = THIRD.get(name, "1")
    variable, flag = settings.variable(name), settings.flag(name)
    argv = [text] if name == "policy" else [flag, text]
    assert getattr(read().config, name) == FIELDS[name].default
    for loaded, origin in (
        (read(*argv, tmp_path=tmp_path, lines=f"{variable}={third}\n", **{variable: third}), "flag"),
        (read(tmp_path=tmp_path, lines=f"{variable}={third}\n", **{variable: text}), "environment"),
        (read(tmp_path=tmp_path, lines=f"{variable}={text}\n"), ".env"),
    ):
        assert getattr(loaded.config, name) == value
        assert loaded.origin[name] == origin
        assert not loaded.warnings
    assert read(**{variable: ""}).origin[name] == "default"


def test_batching_is_the_original_variable_and_unset_is_nobatch(tmp_path: Path) -> None:
    assert read(BATCHING="dynamic").config.policy == "dynamic"
    assert read(BATCHING="dynamic", EB_POLICY="static").config.policy == "static"
    assert read("nobatch", BATCHING="dynamic").config.policy == "nobatch"
    for mark in ("", "\ufeff"):  # a byte order mark hides no line
        assert read(tmp_path=tmp_path, lines=f"{mark}BATCHING=static\n").config.policy == "static"
    assert read(tmp_path=tmp_path, lines="EB_POLICY=static\n", BATCHING="dynamic").config.policy == "dynamic"
    assert read().config.policy == "nobatch"


@pytest.mark.parametrize(
    ("line", "task", "policy", "demo"),
    [
        ("static", "serve", "static", False), ("doctor static", "doctor", "static", False),
        ("demo static --doctor", "doctor", "static", True), ("doctor --print-config", "print-config", "nobatch", False),
        *((words, "serve", "dynamic", True)
          for words in ("demo", "--demo", "dynamic --demo", "--demo dynamic", "--demo on --port 9000")),
    ],
)  # fmt: skip
def test_the_first_word_or_a_flag_says_what_to_do(line: str, task: str, policy: str, demo: bool) -> None:
    loaded = read(*line.split())
    assert (loaded.task, loaded.config.policy, loaded.config.demo) == (task, policy, demo)
    assert (loaded.config.model, loaded.origin["model"]) == (
        (settings.DEMO["model"], "demo") if demo else ("", "default")
    )


def test_the_demo_changes_only_what_nothing_else_sets() -> None:
    usual, chosen = read("--demo", "on"), read("static", "--demo", "on", EB_MODEL="mock:llm-mock")
    assert usual.config.max_batch_size == 8
    assert usual.config.model.startswith("mock:")  # nothing to download
    assert (chosen.config.policy, chosen.config.model, chosen.config.max_batch_size) == ("static", "mock:llm-mock", 8)
    assert read("--demo", "off").config == read().config


def test_the_serving_process_gets_exactly_the_settings_of_its_launcher(tmp_path: Path) -> None:
    config = Config(policy="static", prefix_cache=False, kv_memory=5 << 20, request_timeout=1.5)
    dotenv = tmp_path / ".env"
    dotenv.write_text("EB_API_KEY=old\nEB_MODEL=gpt2\nEB_PREFIX_CACHE=on\n")
    loaded = load((), config.to_environment(), dotenv)
    assert loaded.config == config
    assert not loaded.warnings


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("port", "0", "from 1 to 65,535"),
        ("port", "65536", "from 1 to 65,535"),
        ("max_batch_size", "0", "from 1 to 4,096"),
        ("max_batch_size", "5000", "from 1 to 4,096"),
        ("max_queue", "-1", "from 0 to"),
        ("request_timeout", "0", "from 0.01 to"),
        ("request_timeout", "inf", "to 86,400"),
        ("prefix_cache", "maybe", "Use on or off"),
        ("device", "gpu", "Use one of: auto, cpu, cuda"),
        ("dtype", "flaot32", "Did you mean 'float32'? Use one of: auto, float32, bfloat16, float16"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_the_name_it_was_given(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    variable, flag = settings.variable(name), settings.flag(name)
    message = refusal(**{variable: text})
    assert message.startswith(f"{variable} is ")
    assert words in message
    with pytest.raises(ConfigError, match=variable):
        read(tmp_path=tmp_path, lines=f"{variable}={text}\n")
    message = refusal(f"{flag}={text}")
    assert message.startswith(f"{flag} is ")
    assert words in message


def test_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"--max-batch-size is 0\. .* from 1 to 4,096"):
        Config(max_batch_size=0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("kv_memory", text, size) for text, size in (
            ("0", 0), ("512M", 512 << 20), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("4KB", 4096), ("7", 7)
        )),
        *(("prefix_cache", word, True) for word in ("on", "ON", "1", "true", "yes")),
        *(("address", host, address) for host, address in (
            ("::", "[::]:1"), ("[::]", "[::]:1"), ("[::1]", "[::1]:1"), ("localhost", "localhost:1"),
            ("10.1.2.3", "10.1.2.3:1"),
        )),
    ],
)  # fmt: skip
def test_sizes_have_units_switches_many_words_and_ipv6_addresses_brackets(name: str, text: str, value: Any) -> None:
    setting = "host" if name == "address" else name
    assert getattr(read(settings.flag(setting), text, "--port", "1").config, name) == value
    assert getattr(read("--port", "1", **{settings.variable(setting): text}).config, name) == value


NO_HOSTS = ["", " ", "[", "[::", "::]", "[]", "[127.0.0.1]", "1:2", "zz::", "a b", "http://x", "x:8500", "*", "a/b"]


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["dynamic", "--max-batch=4"], {}, ["'--max-batch'", "--max-batch-size"]),
        (["dynamic", "extra"], {}, ["argument (extra)", "--help"]),
        (["--apikey=hunter2"], {}, ["'--apikey'", "--api-key"]),
        ([], {"EB_API_KEY": "hunter2\u00efm\n"}, ["EB_API_KEY", "ASCII"]),  # which no header holds
        *((["--host", host], {}, [repr(host)]) for host in NO_HOSTS),
    ],
)
def test_what_cannot_be_read_is_named_with_its_remedy_and_no_secret_is_shown(
    argv: list[str], environ: dict[str, str], words: list[str]
) -> None:
    line = refusal(*argv, **environ)
    assert all(word in line for word in words)
    assert "hunter2" not in line


def test_an_unreadable_dotenv_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_bytes(b"EB_PORT=\xff\xfe\n")
    with pytest.raises(ConfigError, match="Use plain UTF-8"):
        load((), {}, path)


def test_unknown_eb_names_are_warned_of_with_the_nearest(tmp_path: Path) -> None:
    known = {"EB_CACHE_DIR": "x", "EB_PYTHON": "python3"}
    loaded = read(tmp_path=tmp_path, lines="EB_MODLE=gpt2\nOTHER=1\n", EB_PROT="1", EB_XYZZY="2", **known)
    assert loaded.warnings == [
        "the variable EB_MODLE is not a setting and is ignored. Did you mean 'EB_MODEL'?",
        "the variable EB_PROT is not a setting and is ignored. Did you mean 'EB_PORT'?",
        "the variable EB_XYZZY is not a setting and is ignored.",
    ]


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    with pytest.raises(SystemExit):
        load(argv, {}, NOTHING, {"dynamic": "each step"}, ["fcfs", "sjf"])
    return capsys.readouterr().out.splitlines()


def test_help_all_shows_all_with_default_variable_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys, "--help", "all")
    assert help_of(capsys, "all", "--help") == lines
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for item in dataclasses.fields(Config):
        assert f"{settings.variable(item.name)}]" in text
        if item.name != "policy":
            assert settings.flag(item.name) in text
    assert "[8500, 1..65535; EB_PORT]" in text
    assert "[64, 1..4096; EB_MAX_BATCH_SIZE]" in text
    assert "0..1048576; EB_MAX_TOKENS_PER_STEP]" in text
    assert "auto|float32|bfloat16|float16" in text


def test_help_shows_the_common_flags_first_and_how_to_see_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(capsys, "--help")
    flags = re.findall(r"^  --([\w-]+)", "\n".join(lines), re.MULTILINE)
    assert [flag.replace("-", "_") for flag in flags] == [*settings.COMMON]
    assert "as in dynamic+sjf, changes who is next in the queue: fcfs, sjf" in " ".join(" ".join(lines).split())
    assert lines[-1] == "./server.sh --help all shows every flag."
    assert max(map(len, lines)) <= 80


def test_help_lists_the_policies_and_print_config_hides_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("EB_") or name == "BATCHING"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EB_API_KEY", "hunter2")
    with pytest.raises(SystemExit):
        app.main(["--help"])
    text = capsys.readouterr().out
    for name in policies.names():
        assert re.search(rf"^  {name} +\w.*\w", text, re.M), name
    app.main(["static", "--port", "9000", "--print-config"])
    shown = capsys.readouterr()
    rows = {row.split()[0]: row.split()[1:] for row in shown.out.splitlines()}
    assert set(rows) == {settings.flag(name) for name in FIELDS}
    assert rows["--policy"] == ["static", "flag"]
    assert rows["--port"] == ["9000", "flag"]
    assert rows["--max-queue"] == ["1024", "default"]
    assert rows["--api-key"] == ["(set)", "environment"]
    assert "hunter2" not in shown.out + shown.err


def test_too_few_open_files_are_refused_and_a_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 128)]
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda _, new: limits.append(new))
    config = Config()
    needed = config.connections + 128
    with pytest.raises(ConfigError, match=rf"limit is 128, .* need {needed:,}. Run 'ulimit -n {needed}'"):
        preflight.check_open_files(config)
    limits.append((64, 4096))
    preflight.check_open_files(config)
    assert limits[-1] == (needed, 4096)
    preflight.check_open_files(config)
    assert len(limits) == 3


def test_too_few_addresses_for_pytorch_are_refused_with_the_command_that_lifts_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (500 << 20, -1))
    with pytest.raises(ConfigError, match=r"512,000 KiB.*ulimit -v"):
        preflight.check_torch(Config(model="bard"))
    preflight.check_torch(Config(model="mock:llm-mock"))


def test_threads_exceed_what_may_wait_or_run_and_connections_threads() -> None:
    config = Config(max_batch_size=64, max_queue=100)
    assert config.max_open_requests == 164
    assert config.threads >= 164 + 32
    assert config.connections > config.threads
    assert Config(max_connections=1400).connections == 1400
    with pytest.raises(ConfigError, match=r"is 351, .* 256 and .* 64 need 352: .* Set it to 352"):
        Config(max_queue=256, max_connections=351)


@pytest.mark.parametrize(("queue", "limit"), [({}, 5), ({"queue_timeout": 9}, 5), ({"queue_timeout": 2}, 2)])
def test_waiting_never_outlasts_the_whole(queue: dict[str, Any], limit: float) -> None:
    assert Config(request_timeout=5, **queue).queue_limit == limit


def test_options_of_the_policy_are_given_one_by_one_or_together() -> None:
    loaded = read("dynamic+vtc", "--policy-option", "w_p=1", "--policy-option", "w_q=3,weights=a:2")
    assert loaded.config.policy_options == {"w_p": "1", "w_q": "3", "weights": "a:2"}
    several = read("window", "--policy-option", "delay=0.1,preferred=4,8", "--policy-option", "delay=0.2,preferred=4,8")
    assert several.config.policy_options == {"delay": "0.2", "preferred": "4,8"}
    with pytest.raises(ConfigError, match="Use NAME=VALUE"):
        _ = read("dynamic+vtc", "--policy-option", "w_p").config.policy_options
