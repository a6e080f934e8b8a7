"""Where a server's LoRA adapters come from: folders and repositories of the hub, read for one model.

Part of the composition root. Torch is imported inside the functions that need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batching import BatchingManager
from config import Config
from serving.adapters import AdapterError, AdapterStore, Weights

if TYPE_CHECKING:
    import torch

    from models.sources.resolved import ResolvedModel

HUB_SECONDS = 10.0  # for the hub to answer


def reader(resolved: ResolvedModel, dtype: torch.dtype, config: Config) -> Callable[[str], Weights]:
    """Return the function that reads an adapter for this model from a folder, or from the hub.

    Files that are far larger than --adapter-memory are refused unread, and so are files of folders that requests named
    if they lie outside of --adapter-folder. Errors name files without their folder, since they are sent to clients.
    """
    from generate.cpu.adapters import PreparedAdapter
    from models import adapters, families

    layout = families.family_of(resolved.config).layout
    limit = config.adapter_memory

    def read(source: str) -> Weights:
        folder = _folder(source)
        try:
            if source not in config.adapters.values():
                _check_links(folder, config.adapter_folders)
            return prepared(folder)
        except (ValueError, OSError) as error:
            reason = str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), "its folder")
            raise adapters.AdapterError(reason) from error

    def prepared(folder: Path) -> Weights:
        path = folder / adapters.WEIGHTS
        if path.is_file() and path.stat().st_size > 2 * limit:  # float32, of which bfloat16 is kept
            raise adapters.AdapterError(
                f"{path} has {path.stat().st_size / 2**20:.0f} MiB, but --adapter-memory is {limit / 2**20:.0f} MiB. Raise it"
            )
        adapter = adapters.load(folder, resolved.architecture, layout)
        return PreparedAdapter(adapter, resolved.architecture, dtype)

    return read


def _check_links(folder: Path, allowed: list[Path]) -> None:
    """Raise AdapterError for a file of an adapter that is a link to outside of the allowed folders."""
    from models import adapters

    for name in (adapters.CONFIG, adapters.WEIGHTS):
        path = (folder / name).resolve()
        if not any(path.is_relative_to(parent.resolve()) for parent in allowed):
            raise adapters.AdapterError(f"{name} is a link to outside of --adapter-folder. Put the file itself there")


def _folder(source: str) -> Path:
    """Return the folder of an adapter, after downloading it if it is a repository that is not cached."""
    from models import adapters
    from models.sources import catalog, hub

    path = Path(source).expanduser()
    found = None if path.exists() else catalog.HUB_ID.fullmatch(source)
    if found is None:
        return path
    repository = hub.Repository(found["repository"], found["revision"] or "main")
    try:
        hub.fetch_file(repository, adapters.CONFIG, HUB_SECONDS)
        return hub.fetch_file(repository, adapters.WEIGHTS, HUB_SECONDS).parent
    except hub.HubError as error:
        raise adapters.AdapterError(f"there is no folder {source}, and {error}. {error.remedy}") from error


def make_store(
    config: Config, read: Callable[[str], Weights] | None, reserved: Collection[str], manager: BatchingManager
) -> AdapterStore | None:
    """Return the adapters of a server with those of --adapter in memory, or None for a server without any.

    Raises ValueError where adapters cannot be served, or for one that cannot be read.
    """
    if not config.adapters and not config.adapter_folders:
        return None
    if read is None:
        raise ValueError(
            "--adapter and --adapter-folder need a model with weights on a CPU. Use --device cpu and no mock model, or "
            "leave them out"
        )

    def in_use() -> list[Any]:
        # A request has its weights from its arrival on, so those that the loop has not taken yet count too.
        open_now = [*manager.inbox.open, *(inference.sequence for inference in [*manager.inbox.arrived])]
        return [seq.adapter_weights for seq in open_now]

    store = AdapterStore(read, config.adapter_memory, reserved, in_use)
    for name, source in config.adapters.items():
        try:
            store.add(name, source)
        except AdapterError as error:
            raise ValueError(f"--adapter {name}={source}: {error}") from error
    return store
