"""deploy/k8s fits Kubernetes and the server: schemas, settings, routes, ports, labels, times and metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomize import Object, build, containers, find
from prometheus_client.parser import text_string_to_metric_families
from test_deploy import check_query

import config
import policies
from api.hooks.auth import OPEN
from app import connect, create_app, load_engine
from config import Config
from tests.support import ROOT, wait_until

FOLDER = ROOT / "deploy" / "k8s"
OVERLAYS = ["cpu", "gpu"]
NAME = "effective-batching"
LABEL = {"app.kubernetes.io/name": NAME}
VERSIONS = ["1.27", "1.37"]  # the oldest that docs/operations.md names, and the newest whose schemas are installed

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def mapping(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of a mapping that has these keys and no others."""
    return {
        "type": "object", "properties": required | optional, "required": list(required), "additionalProperties": False,
    }  # fmt: skip


def sequence(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, WHOLE = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
SCALING = mapping(
    {"policies": sequence(mapping({"type": {"enum": ["Pods", "Percent"]}, "value": WHOLE, "periodSeconds": WHOLE}))},
    stabilizationWindowSeconds=WHOLE, selectPolicy={"enum": ["Max", "Min", "Disabled"]},
)  # fmt: skip
# The fields that deploy/k8s uses of custom resources. Metadata of a trigger are texts, as KEDA wants them.
CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledObject"): mapping(
        {
            "scaleTargetRef": mapping({"name": TEXT}),
            "minReplicaCount": {"type": "integer", "minimum": 1}, "maxReplicaCount": WHOLE,
            "triggers": sequence(mapping({
                "type": {"const": "prometheus"}, "name": TEXT, "metricType": {"enum": ["AverageValue", "Value"]},
                "metadata": mapping(
                    {
                        "serverAddress": {"type": "string", "pattern": r"^http://[\w.-]+:\d+$"}, "query": TEXT,
                        "threshold": {"type": "string", "pattern": r"^\d+$"},
                    },
                    ignoreNullValues={"enum": ["true", "false"]},
                ),
            })),
        },
        pollingInterval=WHOLE,
        advanced=mapping({
            "horizontalPodAutoscalerConfig": mapping({"behavior": mapping({"scaleUp": SCALING, "scaleDown": SCALING})})
        }),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): mapping({
        "jobLabel": TEXT, "selector": mapping({"matchLabels": {"type": "object"}}),
        "podMetricsEndpoints": sequence(mapping({
            "port": TEXT, "path": TEXT, "interval": {"type": "string", "pattern": r"^\d+s$"},
            "authorization": mapping({"type": {"const": "Bearer"}, "credentials": mapping({"name": TEXT, "key": TEXT})}),
        })),
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def built() -> dict[str, list[Object]]:
    return {name: build(FOLDER / name) for name in (*OVERLAYS, "autoscaling")}


def deployment(objects: list[Object]) -> Object:
    return find(objects, "Deployment", NAME)


def pod(objects: list[Object]) -> Object:
    result: Object = deployment(objects)["spec"]["template"]["spec"]
    return result


def server(objects: list[Object]) -> Object:
    (container,) = containers(deployment(objects))
    return container


def settings(objects: list[Object]) -> dict[str, str]:
    data: dict[str, str] = find(objects, "ConfigMap", NAME)["data"]
    return data


@every_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_has_only_fields_that_kubernetes_knows(
    built: dict[str, list[Object]], overlay: str, version: str
) -> None:
    import kubernetes_validate

    kinds = {o["kind"] for o in built[overlay]}
    assert kinds == {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
    for entry in built[overlay]:
        kubernetes_validate.validate(entry, version, strict=True)


def test_each_custom_resource_has_only_fields_that_its_definition_knows(built: dict[str, list[Object]]) -> None:
    import jsonschema

    for entry in built["autoscaling"]:
        assert entry["metadata"] == {"name": NAME, "labels": LABEL}
        jsonschema.validate(entry["spec"], CUSTOM[entry["apiVersion"], entry["kind"]])
    assert {o["kind"] for o in built["autoscaling"]} == {"ScaledObject", "PodMonitor"}


@pytest.mark.full
@every_overlay
def test_kubectl_builds_the_same_objects(built: dict[str, list[Object]], overlay: str) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here: install it, no cluster is needed")
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    names = re.sub(rf"\b{NAME}-[a-z0-9]{{10}}$", NAME, text, flags=re.M)
    assert {o["kind"]: o for o in yaml.safe_load_all(names)} == {o["kind"]: o for o in built[overlay]}


@every_overlay
def test_the_server_accepts_every_setting(built: dict[str, list[Object]], overlay: str, tmp_path: Path) -> None:
    variables = settings(built[overlay])
    loaded = config.load([], variables, tmp_path / "none")
    assert loaded.warnings == []
    assert set(variables) == {config.variable(name) for name, origin in loaded.origin.items() if origin != "default"}
    assert loaded.config.policy in policies.names()
    assert loaded.config.device == {"cpu": "cpu", "gpu": "cuda"}[overlay]


@every_overlay
def test_the_container_starts_as_the_image_does_with_settings_from_its_environment_alone(
    built: dict[str, list[Object]], overlay: str
) -> None:
    container = server(built[overlay])
    assert container["command"] == ["python", "app.py"]
    assert "args" not in container
    assert 'ENTRYPOINT ["python", "app.py"]' in dockerfile()
    sources = container["envFrom"]
    assert sources == [{"configMapRef": {"name": NAME}}, {"secretRef": {"name": NAME}}]
    assert "env" not in container  # the server reads its limits of cores and memory itself
    assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
    assert not pod(built[overlay])["enableServiceLinks"]  # a Service named eb would set EB_PORT


def dockerfile() -> str:
    return (ROOT / "deploy" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")


@every_overlay
def test_probes_ask_routes_that_need_no_key_at_the_port_of_the_server(
    built: dict[str, list[Object]], overlay: str
) -> None:
    container = server(built[overlay])
    paths = {}
    for kind in ("startup", "readiness", "liveness"):
        asked = container[f"{kind}Probe"]["httpGet"]
        paths[kind] = asked["path"]
        assert asked["port"] == "http"
        hosts = [header["value"] for header in asked["httpHeaders"] if header["name"] == "Host"]
        assert set(hosts) <= set(Config(trusted_hosts="llm.example.org").hosts or ())
    assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= OPEN
    assert container["ports"] == [{"name": "http", "containerPort": Config().port}]
    assert find(built[overlay], "Service", NAME)["spec"]["ports"] == [
        {"name": "http", "port": Config().port, "targetPort": "http"}
    ]


@every_overlay
def test_each_selector_finds_the_pods(built: dict[str, list[Object]], overlay: str) -> None:
    objects = built[overlay] + built["autoscaling"]
    assert deployment(objects)["spec"]["template"]["metadata"]["labels"] == LABEL
    assert find(objects, "Service", NAME)["spec"]["selector"] == LABEL
    selectors = [o["spec"]["selector"] for o in objects if o["kind"] not in ("Service", "ConfigMap", "ScaledObject")]
    selectors += [constraint["labelSelector"] for constraint in pod(objects)["topologySpreadConstraints"]]
    assert selectors == [{"matchLabels": LABEL}] * 4
    assert find(objects, "ScaledObject", NAME)["spec"]["scaleTargetRef"] == {
        "name": deployment(objects)["metadata"]["name"]
    }


@every_overlay
def test_a_pod_is_killed_later_than_its_longest_request_ends(built: dict[str, list[Object]], overlay: str) -> None:
    command, seconds = server(built[overlay])["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain = int(settings(built[overlay])["EB_REQUEST_TIMEOUT"]) + 10  # graceful_timeout of gunicorn_conf.py
    assert pod(built[overlay])["terminationGracePeriodSeconds"] > int(seconds) + drain


@every_overlay
def test_the_container_writes_where_it_may_as_the_user_of_the_image(
    built: dict[str, list[Object]], overlay: str
) -> None:
    container, whole = server(built[overlay]), pod(built[overlay])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    (user,) = re.findall(r"useradd .*--uid (\d+)", dockerfile())
    assert whole["securityContext"]["runAsNonRoot"]
    assert {whole["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in whole["volumes"]}
    written = re.findall(r"\w+=(/\S+)", " ".join(re.findall(r"^ENV (.*)$", dockerfile(), re.M)))
    assert len(written) >= 3
    assert all(path.startswith("/cache/") for path in written)
    assert mounts.keys() == {"/cache", "/tmp"}


@every_overlay
def test_the_image_is_that_of_the_commands_at_the_top(built: dict[str, list[Object]], overlay: str) -> None:
    text = (FOLDER / overlay / "kustomization.yaml").read_text("utf-8")
    built_with, pushed = re.findall(r"^#   docker (?:build|push)\b.*?(\S+/\S+:\S+?)(?: \.)?$", text, re.M)
    assert built_with == pushed == server(built[overlay])["image"]
    assert pushed.partition(":")[2] == config.VERSION + ("-gpu" if overlay == "gpu" else "")
    assert ("--build-arg TORCH_INDEX= " in text) == (overlay == "gpu")
    assert f"kubectl apply -k deploy/k8s/{overlay}\n" in text
    assert f"kubectl create secret generic {NAME} --from-literal=EB_API_KEY=" in text
    assert server(built[overlay])["resources"]["limits"].get("nvidia.com/gpu") == ("1" if overlay == "gpu" else None)


def test_no_file_holds_a_secret(built: dict[str, list[Object]]) -> None:
    objects = [entry for entries in built.values() for entry in entries]
    assert "Secret" not in {entry["kind"] for entry in objects}
    named = {name for overlay in OVERLAYS for name in settings(built[overlay])}
    assert config.variable("api_key") not in named
    for path in FOLDER.rglob("*.yaml"):
        assert not re.search(r"[0-9A-Za-z+/]{32,}", path.read_text("utf-8")), path


def test_prometheus_scrapes_with_the_key_as_the_job_of_the_alerts(built: dict[str, list[Object]]) -> None:
    monitor = find(built["autoscaling"], "PodMonitor", NAME)["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert endpoint["authorization"]["credentials"] == {"name": NAME, "key": config.variable("api_key")}
    job = LABEL[monitor["jobLabel"]]
    assert f'up{{job="{job}"}}' in (ROOT / "deploy" / "alerts.yml").read_text("utf-8")
    assert all(f'{{job="{job}"}}' in query for query in queries(built))


def queries(built: dict[str, list[Object]]) -> Iterator[str]:
    for trigger in find(built["autoscaling"], "ScaledObject", NAME)["spec"]["triggers"]:
        yield trigger["metadata"]["query"]


def test_a_running_server_exports_what_the_replicas_follow(built: dict[str, list[Object]]) -> None:
    named = set().union(*map(check_query, queries(built)))
    assert named == {"vllm:num_requests_waiting", "vllm:num_requests_running"}
    running = Config(policy="dynamic", model="mock:llm-mock@10")
    app, engine = create_app(running), load_engine(running)
    try:
        wait_until(lambda: engine.manager.is_alive)
        connect(app.extensions["service"], engine)
        families = text_string_to_metric_families(app.test_client().get("/metrics").text)
        values = {sample.name: sample.value for family in families for sample in family.samples}
    finally:
        engine.manager.stop()
    assert {name: values[name] for name in named} == dict.fromkeys(named, 0)


@every_overlay
def test_a_busy_replica_is_not_taken_away_before_its_slots_are_free(
    built: dict[str, list[Object]], overlay: str
) -> None:
    spec = find(built["autoscaling"], "ScaledObject", NAME)["spec"]
    threshold = {trigger["name"]: int(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]}
    variables = settings(built[overlay])
    slots, queue = (int(variables[name]) for name in ("EB_MAX_BATCH_SIZE", "EB_MAX_QUEUE"))
    assert slots / 2 < threshold["load"] < slots
    assert threshold["queue"] < queue  # or the queue would refuse before another replica came
    assert spec["minReplicaCount"] < spec["maxReplicaCount"]
