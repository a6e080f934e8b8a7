"""deploy/k8s fits Kubernetes and the server: schemas, settings, routes, ports, labels, times and metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_deploy import check_query

import config
import policies
from api.hooks.admission import OPEN
from config import Config
from tests.support import ROOT

FOLDER = ROOT / "deploy" / "k8s"
NAME = "effective-batching"
LABEL = {"app.kubernetes.io/name": NAME}
VERSIONS = ["1.27", "1.37"]  # the oldest that docs/operations.md names, and the newest whose schemas are installed


def read(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text("utf-8"))


BASE = {
    object["kind"]: object
    for object in map(read, (f"base/{name}" for name in read("base/kustomization.yaml")["resources"]))
}
POD = BASE["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
SCALED, MONITOR = read("autoscaling/scaledobject.yaml"), read("autoscaling/podmonitor.yaml")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")

every_overlay = pytest.mark.parametrize("overlay", ["cpu", "gpu"])


def settings(overlay: str) -> dict[str, str]:
    """Return the settings of an overlay, which are added to those of the base."""
    made = [read(f"{folder}/kustomization.yaml")["configMapGenerator"] for folder in ("base", overlay)]
    assert [generator["name"] for (generator,) in made] == [NAME] * 2
    return dict(literal.split("=", 1) for (generator,) in made for literal in generator["literals"])


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_has_only_fields_that_kubernetes_knows(version: str) -> None:
    import kubernetes_validate

    assert BASE.keys() == {"Deployment", "Service", "PodDisruptionBudget"}
    for entry in BASE.values():
        kubernetes_validate.validate(entry, version, strict=True)


@pytest.mark.full
@every_overlay
def test_what_kubectl_builds_has_the_settings_and_only_known_fields(overlay: str) -> None:
    import kubernetes_validate

    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here: install it, no cluster is needed")
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    built = [*yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)]
    for entry in built:
        for version in VERSIONS:
            kubernetes_validate.validate(entry, version, strict=True)
    assert {entry["kind"] for entry in built} == {"ConfigMap", *BASE}  # and no Secret
    assert next(entry["data"] for entry in built if entry["kind"] == "ConfigMap") == settings(overlay)


@every_overlay
def test_the_server_accepts_every_setting_and_none_is_the_key(overlay: str, tmp_path: Path) -> None:
    variables = settings(overlay)
    loaded = config.load([], variables, tmp_path / "none")
    assert loaded.warnings == []
    assert set(variables) == {config.variable(name) for name, origin in loaded.origin.items() if origin != "default"}
    assert loaded.config.policy in policies.names()
    assert loaded.config.device == {"cpu": "cpu", "gpu": "cuda"}[overlay]
    assert config.variable("api_key") not in variables


def test_the_container_starts_as_the_image_does_with_settings_from_its_environment_alone() -> None:
    assert SERVER["command"] == ["python", "app.py"]
    assert 'ENTRYPOINT ["python", "app.py"]' in DOCKERFILE
    assert SERVER["envFrom"] == [{"configMapRef": {"name": NAME}}, {"secretRef": {"name": NAME}}]
    assert not {"args", "env"} & SERVER.keys()  # the server reads its limits of cores and memory itself
    assert not POD["enableServiceLinks"]  # a Service named eb would set EB_PORT


def test_probes_ask_routes_that_need_no_key_at_the_port_of_the_server() -> None:
    probes = {kind: SERVER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    paths = {kind: asked["path"] for kind, asked in probes.items()}
    assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= OPEN
    assert {asked["port"] for asked in probes.values()} == {"http"}
    hosts = {h["value"] for asked in probes.values() for h in asked["httpHeaders"] if h["name"] == "Host"}
    assert hosts <= set(Config(trusted_hosts="llm.example.org").hosts or ())
    assert SERVER["ports"] == [{"name": "http", "containerPort": Config().port}]
    assert BASE["Service"]["spec"]["ports"] == [{"name": "http", "port": Config().port, "targetPort": "http"}]


def test_each_name_and_selector_finds_the_pods() -> None:
    assert BASE["Deployment"]["spec"]["template"]["metadata"]["labels"] == LABEL
    assert BASE["Service"]["spec"]["selector"] == LABEL
    selectors = [object["spec"]["selector"] for object in (BASE["Deployment"], BASE["PodDisruptionBudget"], MONITOR)]
    selectors += [constraint["labelSelector"] for constraint in POD["topologySpreadConstraints"]]
    assert selectors == [{"matchLabels": LABEL}] * 4
    assert {object["metadata"]["name"] for object in (*BASE.values(), SCALED, MONITOR)} == {NAME}
    assert SCALED["spec"]["scaleTargetRef"] == {"name": NAME}


@every_overlay
def test_a_pod_is_killed_later_than_its_longest_request_ends(overlay: str) -> None:
    command, seconds = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain = int(settings(overlay)["EB_REQUEST_TIMEOUT"]) + 10  # graceful_timeout of launch/gunicorn_conf.py
    assert POD["terminationGracePeriodSeconds"] > int(seconds) + drain


def test_the_container_writes_where_it_may_as_the_user_of_the_image() -> None:
    assert SERVER["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    (user,) = re.findall(r"useradd .*--uid (\d+)", DOCKERFILE)
    assert POD["securityContext"]["runAsNonRoot"]
    assert {POD["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
    mounts = {mount["mountPath"]: mount["name"] for mount in SERVER["volumeMounts"]}
    assert mounts.keys() == {"/cache", "/tmp"}  # test_deploy.py: the image writes below /cache
    assert set(mounts.values()) == {volume["name"] for volume in POD["volumes"]}


@every_overlay
def test_an_overlay_has_the_image_of_the_commands_at_its_top_and_its_limits(overlay: str) -> None:
    text, recipe = (FOLDER / overlay / "kustomization.yaml").read_text("utf-8"), read(f"{overlay}/kustomization.yaml")
    built_with, pushed = re.findall(r"^#   docker (?:build|push)\b.*?(\S+/\S+:\S+?)(?: \.)?$", text, re.M)
    (image,), (patch,) = recipe["images"], recipe["patches"]
    assert image["name"] == SERVER["image"]
    assert built_with == pushed == f"{image['newName']}:{image['newTag']}"
    assert image["newTag"] == config.VERSION + ("-gpu" if overlay == "gpu" else "")
    assert ("--build-arg TORCH_INDEX= " in text) == (overlay == "gpu")
    assert f"kubectl apply -k deploy/k8s/{overlay}\n" in text
    assert f"kubectl create secret generic {NAME} --from-literal=EB_API_KEY=" in text
    change = yaml.safe_load(patch["patch"])
    (container,) = change["spec"]["template"]["spec"]["containers"]
    assert (change["metadata"]["name"], container["name"]) == (NAME, SERVER["name"])
    limits = container["resources"]["limits"]
    assert limits.keys() >= {"cpu", "memory"}
    assert limits.get("nvidia.com/gpu") == ("1" if overlay == "gpu" else None)


def test_no_file_holds_a_secret() -> None:
    for path in FOLDER.rglob("*.yaml"):
        assert not re.search(r"[0-9A-Za-z+/]{32,}", path.read_text("utf-8")), path


def test_prometheus_scrapes_with_the_key_as_the_job_of_the_alerts() -> None:
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert endpoint["authorization"]["credentials"] == {"name": NAME, "key": config.variable("api_key")}
    job = LABEL[MONITOR["spec"]["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy" / "alerts.yml").read_text("utf-8")
    queries = [trigger["metadata"]["query"] for trigger in SCALED["spec"]["triggers"]]
    assert all(f'{{job="{job}"}}' in query for query in queries)
    # Both are exported: test_metrics.py has their names.
    assert set().union(*map(check_query, queries)) == {"vllm:num_requests_waiting", "vllm:num_requests_running"}


@every_overlay
def test_a_busy_replica_is_not_taken_away_before_its_slots_are_free(overlay: str) -> None:
    spec = SCALED["spec"]
    threshold = {trigger["name"]: int(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]}
    slots, queue = (int(settings(overlay)[name]) for name in ("EB_MAX_BATCH_SIZE", "EB_MAX_QUEUE"))
    assert slots / 2 < threshold["load"] < slots
    assert threshold["queue"] < queue  # or the queue would refuse before another replica came
    assert spec["minReplicaCount"] < spec["maxReplicaCount"]
