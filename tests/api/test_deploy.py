"""What lies in deploy/ fits the server: metric names, flags, times, and the tools' own checks where they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from test_metrics import NAMES

from api.hooks import middleware
from api.hooks.admission import OPEN
from config import Config
from integrations.queue.options import build_command
from scheduling.iteration import SlotSteps
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
SUFFIXES = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}


def read(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


NAMED = re.compile(r"\b((?:vllm:|eb_)\w+)(?:\{([^}]*)\})?")
OF_PROMETHEUS = {"instance", "job"}


def known_labels() -> dict[str, set[str]]:
    """Return the labels of every series that the server exports, Prometheus's own among them."""
    return {
        name + suffix: labels | OF_PROMETHEUS | ({"le"} if suffix == "_bucket" else set())
        for kind, names in NAMES.items()
        for name, labels in names.items()
        for suffix in SUFFIXES[kind]
    }


def check_query(query: str) -> set[str]:
    """Fail unless a query names only series and labels that exist; return the series."""
    known = known_labels()
    named = {name for name, _ in NAMED.findall(query)}
    assert named <= known.keys(), query
    for name, matchers in NAMED.findall(query):
        assert set(re.findall(r"(\w+)=", matchers)) <= known[name], query
    for grouped in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query):
        assert set(re.split(r", *", grouped)) <= set().union(*(known[name] for name in named)), query
    reasons = set(re.findall(r'reason="(\w+)"', query))
    assert reasons <= {*middleware.REJECTED_TYPES.values(), *middleware.REJECTIONS.values()}
    assert set(re.findall(r'kind="(\w+)"', query)) <= set(SlotSteps._fields)
    assert query.count("(") == query.count(")")
    return named


def test_the_board_shows_only_metrics_that_exist_of_the_servers_that_are_chosen() -> None:
    board = json.loads(read("grafana/boards/effective-batching.json"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = set().union(*map(check_query, queries))
    assert len(shown) >= 10
    (variable,) = board["templating"]["list"]
    assert variable["name"] == "instance"
    check_query(variable["query"]["query"])
    assert all('instance=~"$instance"' in matchers for query in queries for _, matchers in NAMED.findall(query))
    assert {panel["type"] for panel in board["panels"][:8]} == {"stat"}
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(places)) == len(set(ids)) == len(board["panels"])


def test_each_alert_names_metrics_that_exist_its_urgency_and_what_to_do() -> None:
    (group,) = yaml.safe_load(read("alerts.yml"))["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    assert len(alerts) == len(group["rules"])
    named = set().union(*(check_query(rule["expr"]) for rule in alerts.values()))
    assert {
        "eb_engine_up", "eb_rejected_total", "eb_step_failures_total", "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
    } <= named  # fmt: skip
    assert 'up{job="effective-batching"} == 0' in alerts["ServerDown"]["expr"]
    for rule in alerts.values():
        assert re.search(r" (==|>|<) ", rule["expr"]), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} == rule["annotations"].keys()


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
        assert service["mem_limit"]
        paths = [str(v).partition(":")[0] for v in service["volumes"]]
        assert all((DEPLOY / path).exists() for path in paths if path.startswith("./"))
        assert {path for path in paths if not path.startswith("./")} <= compose["volumes"].keys()


def test_what_prometheus_and_grafana_record_outlives_their_containers() -> None:
    services = yaml.safe_load(read("compose.yaml"))["services"]
    assert "prometheus:/prometheus" in services["prometheus"]["volumes"]
    assert "--storage.tsdb.path=/prometheus " in services["prometheus"]["command"][0]
    assert "grafana:/var/lib/grafana" in services["grafana"]["volumes"]
    prometheus = yaml.safe_load(read("prometheus.yml"))
    (scraped,) = prometheus["scrape_configs"]
    assert (scraped["job_name"], scraped["static_configs"]) == ("effective-batching", [{"targets": ["server:8500"]}])
    assert f"./alerts.yml:{prometheus['rule_files'][0]}:ro" in services["prometheus"]["volumes"]
    boards = yaml.safe_load(read("grafana/provisioning/dashboards/boards.yaml"))["providers"][0]["options"]["path"]
    assert f"./grafana/boards:{boards}:ro" in services["grafana"]["volumes"]
    for path in (DEPLOY / "grafana" / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_the_image_computes_on_a_cpu_unless_it_is_built_for_a_gpu() -> None:
    text = read("Dockerfile")
    assert "whl/cpu" in re.findall(r"^ARG TORCH_INDEX=(.*)$", text, re.M)[0]
    assert yaml.safe_load(read("compose.yaml"))["services"]["gpu"]["build"]["args"] == {"TORCH_INDEX": ""}
    assert "-r" not in (ROOT / "requirements.txt").read_text()  # which is all that is copied before pip runs


@pytest.mark.parametrize(
    ("name", "folder"), [("Dockerfile", "/cache/"), ("effective-batching.service", "/var/cache/effective-batching/")]
)
def test_caches_lie_where_a_read_only_system_is_writable(name: str, folder: str) -> None:
    text = read(name).replace("\\\n", " ")
    lines = " ".join(line for line in text.splitlines() if re.match("(ENV |Environment=)", line))
    paths = dict(re.findall(r"(\w+)=(/\S+)", lines))
    assert {"HF_HOME", "EB_CACHE_DIR", "TRITON_CACHE_DIR"} <= paths.keys()
    assert all(path.startswith(folder) for path in paths.values())


@pytest.mark.parametrize(
    "name",
    [
        "Dockerfile", "compose.yaml", "effective-batching.service", "nginx.conf", "nginx-upstreams.conf",
        "k8s/cpu/kustomization.yaml", "k8s/gpu/kustomization.yaml",
    ],
)  # fmt: skip
def test_the_commands_at_the_top_of_a_file_name_files_that_exist(name: str) -> None:
    commands = re.findall(r"^#   (.+)$", read(name), re.M)
    assert len(commands) >= 5
    named = {path for command in commands for path in re.findall(r"(?<![\w/])(?:deploy|tools)/[\w./-]+", command)}
    assert named
    assert all((ROOT / path).exists() for path in named)


def test_the_container_is_no_root_asks_ready_and_ends_by_sigterm() -> None:
    text = read("Dockerfile")
    steps = [line.partition(" ")[0] for line in text.splitlines() if re.match("[A-Z]+ ", line)]
    assert steps.index("USER") < steps.index("ENTRYPOINT")
    assert "STOPSIGNAL SIGTERM" in text
    asked = re.search(r"127\.0\.0\.1:8500(/\w+)", text)
    assert asked is not None
    assert asked[1] in OPEN  # it has no key
    for paths in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / path).exists() for path in paths.split()), paths


def test_the_unit_stops_later_than_the_server_drains_and_tries_no_broken_settings_again() -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", read("effective-batching.service"), re.M))
    assert int(unit["TimeoutStopSec"]) > Config().request_timeout + 10
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["MemoryMax"]
    assert unit["ExecStart"].endswith("app.py dynamic --host 127.0.0.1")
    assert int(unit["LimitNOFILE"]) > Config().connections


def test_flags_and_files_that_security_names_are_there() -> None:
    text = (ROOT / ".github/SECURITY.md").read_text("utf-8")
    known = {"--" + name.replace("_", "-") for name in Config.__dataclass_fields__}
    known |= {flag for param in build_command().declared for flag in param.opts}  # of the queue
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= known
    for path in re.findall(r"`((?:deploy|api)/[\w./-]+|hub\.py)`", text):
        assert (ROOT / path).exists(), path
