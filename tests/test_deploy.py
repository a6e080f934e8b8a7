"""What lies in deploy/ fits the server: metric names, flags, times, and the tools' own checks where they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from test_metrics import NAMES

from api.auth import OPEN
from app import create_app
from config import Config

DEPLOY = ROOT / "deploy"
SUFFIXES = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}


def read(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


def test_the_board_shows_only_metrics_that_exist() -> None:
    known = {name + s for kind, names in NAMES.items() for name in names for s in SUFFIXES[kind]}
    board = json.loads(read("grafana/boards/effective-batching.json"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"\b(?:vllm:|eb_)\w+", query)}
    assert len(board["panels"]) >= 10
    assert len(shown) >= 10
    assert shown <= known, shown - known


def test_compose_has_its_profiles_and_stops_later_than_the_server_drains() -> None:
    compose: dict[str, Any] = yaml.safe_load(read("compose.yaml"))
    services = compose["services"]
    assert {p for s in services.values() for p in s["profiles"]} == {"cpu", "gpu", "monitoring"}
    for name in ("cpu", "gpu"):
        service = services[name]
        assert service["read_only"]
        assert service["init"]
        assert int(service["stop_grace_period"].removesuffix("s")) > Config().request_timeout + 10
    for service in services.values():
        paths = [str(v).partition(":")[0] for v in service["volumes"]]
        assert all((DEPLOY / path).exists() for path in paths if path.startswith("./"))
    prometheus = yaml.safe_load(read("prometheus.yml"))
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["server:8500"]}]
    for path in (DEPLOY / "grafana" / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_the_container_is_no_root_asks_ready_and_ends_by_sigterm() -> None:
    text = read("Dockerfile")
    steps = [line.partition(" ")[0] for line in text.splitlines() if re.match("[A-Z]+ ", line)]
    assert steps.index("USER") < steps.index("ENTRYPOINT")
    assert "STOPSIGNAL SIGTERM" in text
    asked = re.search(r"127\.0\.0\.1:8500(/\w+)", text)
    assert asked is not None
    assert asked[1] in OPEN  # it has no key
    for path in re.findall(r"^COPY (\S+) ", text, re.M):
        assert (ROOT / path).exists(), path


def test_nginx_outlasts_the_longest_request_and_hides_what_is_not_for_strangers() -> None:
    text = re.sub(r"#.*", "", read("nginx.conf"))
    assert text.count("{") == text.count("}")
    settings = dict(re.findall(r"^\s*(\w+) ([^;{]+);", text, re.M))
    assert int(settings["proxy_read_timeout"].removesuffix("s")) >= Config().request_timeout
    assert settings["client_max_body_size"] == "1m"
    assert {settings[k] for k in ("client_header_timeout", "client_body_timeout")} == {"10s"}
    assert (settings["proxy_buffering"], settings["proxy_ignore_client_abort"]) == ("off", "off")
    assert settings["proxy_http_version"] == "1.1"
    hidden = re.search(r"location ~ \^/\(([^)]+)\)", text)
    assert hidden is not None
    routes = {rule.rule.split("/")[1] for rule in create_app(Config()).url_map.iter_rules()}
    assert set(hidden[1].split("|")) <= routes


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_itself_accepts_the_sample(tmp_path: Path) -> None:
    text = read("nginx.conf").replace("443 ssl", "127.0.0.1:8443")
    text = re.sub(r"^ *ssl_.*\n", "", text, flags=re.M)
    (tmp_path / "nginx.conf").write_text(f"events {{}}\nhttp {{\n{text}\n}}\npid {tmp_path}/pid;\n")
    result = subprocess.run(
        ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_the_unit_stops_later_than_the_server_drains_and_tries_no_broken_settings_again() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", read("effective-batching.service"), re.M))
    assert int(unit["TimeoutStopSec"]) > Config().request_timeout + 10
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["ExecStart"].endswith("app.py dynamic --host 127.0.0.1")
    assert int(unit["LimitNOFILE"]) > Config().connections


def test_flags_and_files_that_security_names_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    known = {"--" + name.replace("_", "-") for name in Config.__dataclass_fields__}
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known
    for path in re.findall(r"`((?:deploy|api)/[\w./-]+|hub\.py)`", text):
        assert (ROOT / path).exists(), path
