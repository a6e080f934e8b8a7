"""What `kubectl kustomize` makes of deploy/k8s, for machines without it: only the fields that are used there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

KNOWN = {"apiVersion", "kind", "resources", "configMapGenerator", "patches", "images"}
Object = dict[str, Any]


def build(folder: Path) -> list[Object]:
    """Return the objects of a folder; the names of generated objects lack the hash. Fails for a file that is not there."""
    recipe: Object = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    assert recipe.keys() <= KNOWN, folder
    objects: list[Object] = []
    for name in recipe["resources"]:
        path = folder / name
        objects += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text("utf-8"))
    for generator in recipe.get("configMapGenerator", ()):
        data = dict(literal.split("=", 1) for literal in generator["literals"])
        if generator.get("behavior") == "merge":
            find(objects, "ConfigMap", generator["name"])["data"] |= data
        else:
            objects.append(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
            )
    for patch in recipe.get("patches", ()):
        change = yaml.safe_load(patch["patch"])
        merge(find(objects, change["kind"], change["metadata"]["name"]), change)
    for image in recipe.get("images", ()):
        used = [c for o in objects if o["kind"] == "Deployment" for c in containers(o) if c["image"] == image["name"]]
        assert used, image
        for container in used:
            container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def find(objects: list[Object], kind: str, name: str) -> Object:
    """Return the one object of this kind and name."""
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def containers(deployment: Object) -> list[Object]:
    found: list[Object] = deployment["spec"]["template"]["spec"]["containers"]
    return found


def merge(target: Object, change: Object) -> None:
    """Merge strategically: mappings by key, lists of containers by name; what else is there is replaced."""
    for key, value in change.items():
        if isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        elif key == "containers":
            for item in value:
                (same,) = [container for container in target[key] if container["name"] == item["name"]]
                merge(same, item)
        else:
            target[key] = value
