"""Which model is served: a name or folder becomes a `ResolvedModel`, and that a `GPT` with weights.

`resolve` needs no torch and, for what is already on this machine, no network. It never blames:
every refusal names the reason and what to do. `load` reads the checkpoint tensor by tensor straight
into the wanted dtype.

It must not know tokenizers, HTTP, batching or scheduling.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import checkpoint, hub
from models.checkpoint import CheckpointError

if TYPE_CHECKING:
    import torch

    from models.gpt2 import GPT

DEFAULT = "gpt2-medium"
BARD = Path(__file__).resolve().parents[1] / "weights" / "bard"
NAMES = (*hub.PUBLISHED, "bard")
REMEDY = "Use --model bard, or a local folder, or set HF_HOME to a cache that has it"

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
DUMMY_POOL = 2**20 + 7  # odd, so that the rows of a tiled matrix differ


class UnknownModel(ValueError):
    """The name is neither a model's nor a folder's."""


class ModelUnavailable(ValueError):
    """The model was asked for by name and cannot be had."""


@dataclass(frozen=True)
class ResolvedModel:
    """What will be served: `config` are GPTConfig's arguments, `folder` None means random weights.

    `requested` is what the user asked for (None: nothing). `warning` is set when something else is
    served. `tokenizer` is the folder with the model's own tokenizer files, None for GPT-2's ranks.
    """

    name: str
    requested: str | None
    load_format: str
    folder: Path | None
    revision: str | None
    config: dict[str, Any]
    tokenizer: Path | None
    warning: str | None = None

    def to_json(self) -> str:
        """Return a text for `from_json`: a launcher resolves once and hands it to its workers."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> ResolvedModel:
        """Return what `to_json` was given."""
        fields = json.loads(text)
        for name in ("folder", "tokenizer"):
            fields[name] = fields[name] and Path(fields[name])
        return cls(**fields)


def resolve(model: str | None, load_format: str = "auto", timeout_s: float = 10.0) -> ResolvedModel:
    """Find `model` (a name, a folder, or None for the default) without loading it.

    `load_format` "dummy" asks for random weights: it needs the shape alone. The hub gets
    `timeout_s` seconds to answer. When the default was not asked for and cannot be had, bard is
    returned with a warning. Raises UnknownModel, ModelUnavailable or CheckpointError.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load format {load_format!r} is not known. Use auto or dummy")
    name = _known_name(DEFAULT if model is None else model)
    if name is None:
        return _local(str(model), load_format)
    if name == "bard":
        return _bard(model, load_format)
    published = hub.PUBLISHED[name]
    if load_format == "dummy":
        return ResolvedModel(name, model, "dummy", None, None, published.shape, None)
    try:
        folder = hub.fetch(name, timeout_s)
    except hub.HubError as error:
        if model is not None:
            raise ModelUnavailable(f"cannot load {model}: {error}. {REMEDY}") from error
        warning = (
            f"cannot load {name}: {error}. The small built-in model bard is served INSTEAD; "
            f"it knows only Shakespeare. Set HF_HOME to a cache that has {name}, "
            "connect this machine to the hub, or use --model bard to choose it"
        )
        try:
            return replace(_bard(None, load_format), warning=warning)
        except ModelUnavailable as second:
            raise ModelUnavailable(f"cannot load {name}: {error}; and {second}") from error
    config = _check_folder(folder, "auto")
    tokenizer = _tokenizer_folder(folder)
    return ResolvedModel(name, model, "auto", folder, published.revision, config, tokenizer)


def _known_name(model: str) -> str | None:
    """Return the name in NAMES that `model` means, by itself or with its owner before it."""
    for name, published in hub.PUBLISHED.items():
        if model in (name, published.repo):
            return name
    return "bard" if model == "bard" else None


def _local(model: str, load_format: str) -> ResolvedModel:
    folder = Path(model).expanduser()
    if folder.is_file():
        raise UnknownModel(f"model {model!r} is a file. Use the folder that contains it")
    if not folder.is_dir():
        near = difflib.get_close_matches(model, NAMES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownModel(
            f"unknown model {model!r}, and there is no such folder. {hint}"
            f"Use one of {', '.join(NAMES)}, or a folder with a GPT-2 checkpoint"
        )
    folder = folder.resolve()
    config = _check_folder(folder, load_format)
    tokenizer = _tokenizer_folder(folder)
    weights = folder if load_format == "auto" else None
    return ResolvedModel(folder.name, model, load_format, weights, None, config, tokenizer)


def _bard(requested: str | None, load_format: str) -> ResolvedModel:
    try:
        return replace(_local(str(BARD), load_format), name="bard", requested=requested)
    except (UnknownModel, CheckpointError) as error:
        raise ModelUnavailable(
            f"the built-in model bard is incomplete ({str(error).partition('. ')[0]}). Run "
            "'git checkout weights/bard', or make it again: python tools/train_bard.py --text FILE"
        ) from error


def _check_folder(folder: Path, load_format: str) -> dict[str, Any]:
    """Return the shape of the checkpoint in `folder`, checked as far as it goes without torch."""
    config = checkpoint.read_config(folder)
    if load_format == "dummy":
        return config
    found: dict[str, tuple[int, ...]] = {}
    for path in checkpoint.weight_files(folder):
        if path.suffix != ".safetensors":
            return config  # a pickle shows its tensors only to torch; `load` checks them
        found |= checkpoint.safetensors_shapes(path)
    checkpoint.check_shapes(_plain(found), config, folder)
    return config


def _plain(found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {plain: shape for name, shape in found.items() if (plain := checkpoint.plain_name(name))}


def _tokenizer_folder(folder: Path) -> Path | None:
    files = ("tokenizer.json", "vocab.json", "merges.txt")
    return folder if any((folder / name).is_file() for name in files) else None


def load(resolved: ResolvedModel, dtype: torch.dtype | str = "float32", seed: int = 0) -> GPT:
    """Return the model on the CPU in `dtype`, ready for inference (eval mode, no gradients).

    At no time does more than a tensor or two exist beside the model itself. Random weights depend
    on `seed` alone. Raises CheckpointError when the files do not hold what the config says.
    """
    import torch

    from models.gpt2 import GPT, GPTConfig

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):  # shapes without memory; every tensor is put in place below
        gpt = GPT(GPTConfig(**resolved.config))
    if resolved.folder is None:
        _fill(gpt, dtype, seed)
    else:
        gpt = _read(gpt, resolved.config, resolved.folder, dtype)
    return gpt.eval().requires_grad_(False)


def _read(gpt: GPT, config: dict[str, Any], folder: Path, dtype: torch.dtype) -> GPT:
    """Put the tensors of `folder` into `gpt`, converted to `dtype` one by one."""
    import torch

    expected = checkpoint.expected_shapes({**config, "tie_word_embeddings": False})
    found: dict[str, tuple[int, ...]] = {}
    head = None
    for name, tensor in _tensors(folder):
        found[name] = tuple(tensor.shape)
        if expected.get(name) != found[name]:
            continue  # check_shapes below names it, together with all the others
        source = tensor.to(dtype)  # before it is turned: torch turns and converts at once slowly
        source = source.T if name.endswith(TRANSPOSED) else source
        value = source.clone(memory_format=torch.contiguous_format)
        if name == "lm_head.weight":
            head = value
        else:
            _put(gpt, f"transformer.{name}", value)
    checkpoint.check_shapes(found, config, folder)
    return _join_head(gpt, head)


def _join_head(gpt: GPT, head: torch.Tensor | None) -> GPT:
    """Tie the head to `wte`, or set it apart where the checkpoint does, as transformers does."""
    import torch

    wte = gpt.transformer.wte.weight
    if wte.is_meta:  # a tied checkpoint that stores the matrix under the head's name
        _put(gpt, "transformer.wte.weight", head)
    elif head is not None and not (gpt.config.tie_word_embeddings and torch.equal(head, wte)):
        gpt.config = replace(gpt.config, tie_word_embeddings=False)
        _put(gpt, "lm_head.weight", head)
        return gpt
    gpt.lm_head.weight = gpt.transformer.wte.weight
    return gpt


def _put(gpt: GPT, name: str, value: torch.Tensor) -> None:
    import torch

    module, _, leaf = name.rpartition(".")
    setattr(gpt.get_submodule(module), leaf, torch.nn.Parameter(value, requires_grad=False))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield plain name and tensor of everything the checkpoint in `folder` stores."""
    for path in checkpoint.weight_files(folder):
        read = _safetensors if path.suffix == ".safetensors" else _pickled
        for name, tensor in read(path):
            plain = checkpoint.plain_name(name)
            if plain is not None:
                yield plain, tensor


def _safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, each read from a mapping of its own.

    One mapping for all would keep every page read resident, and the peak would be twice the model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        for name in names:
            with safe_open(path, framework="pt") as file:
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is broken or truncated: {error}. Use a complete file: download it again"
        ) from error


def _pickled(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a pytorch_model.bin, and nothing but tensors from it: a pickle may run any code."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever it happens to run into
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read with weights_only=True: {reason[:200]}. "
            "Use a complete checkpoint in safetensors format"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise CheckpointError(f"{path} is not a table of tensors. Use a GPT2LMHeadModel checkpoint")
    yield from state.items()


def _fill(gpt: GPT, dtype: torch.dtype, seed: int) -> None:
    """Fill `gpt` as `GPT.init_weights` would, but by copying one pool of random numbers.

    Drawing every number of gpt2-medium takes some 5 seconds; copying takes a fraction of one.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(DUMMY_POOL, generator=generator)
    residual = 0.02 / (2 * gpt.config.n_layer) ** 0.5
    scaled = {std: (pool * std).to(dtype) for std in (0.02, residual)}
    place = 0
    for name, parameter in list(gpt.named_parameters()):
        if name.endswith("bias"):
            value = torch.zeros(parameter.shape, dtype=dtype)
        elif ".ln_" in name:
            value = torch.ones(parameter.shape, dtype=dtype)
        else:
            numbers = scaled[residual if name.endswith("c_proj.weight") else 0.02]
            value = torch.empty(parameter.shape, dtype=dtype)
            flat, done = value.view(-1), 0
            while done < len(flat):  # each tensor begins elsewhere in the pool
                n = min(len(flat) - done, DUMMY_POOL - place)
                flat[done : done + n] = numbers[place : place + n]
                done, place = done + n, (place + n) % DUMMY_POOL
        _put(gpt, name, value)
    if gpt.config.tie_word_embeddings:
        gpt.lm_head.weight = gpt.transformer.wte.weight
