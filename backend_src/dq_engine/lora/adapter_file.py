"""Reading adapters that others have put into the adapters' folder.

An adapter is a folder with lora_weights.safetensors or lora_weights.ckpt and lora_config.json beside it, as the
official training writes them, or the path of such a weights file.
"""

import hashlib
import io
import json
import os
import pickle
import zipfile
from pathlib import Path, PurePosixPath

import torch

from dq_engine.errors import invalid
from dq_engine.guarded_files import load_tensors, read_guarded
from dq_engine.lora.layers import AdapterWeights, LoraLayers
from dq_engine.nano import strip_adapter_prefixes

_FIELD = "path"
_WEIGHTS = ("lora_weights.safetensors", "lora_weights.ckpt")
_CONFIG = "lora_config.json"
_SUFFIXES = (".safetensors", ".ckpt", ".pth")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_CONFIG_BYTES = 2**20
_MAX_ALPHA = 1e6
# Names, shapes and the like, beside the matrices.
_OVERHEAD_BYTES = 8 * 2**20


def read_adapter(folder: Path, path: str, layers: LoraLayers) -> tuple[AdapterWeights, str]:
    """Read an adapter, and check that it fits the model.

    Args:
        folder: nothing outside it is read.
        path: of the adapter, relative to `folder` or absolute.
        layers: of the model that it is for.

    Returns:
        It, and a digest that tells the contents of its files from all others.

    Raises:
        RequestError: NOT_FOUND if there is no such adapter; INVALID_ARG if the path leaves the folder, or a file is not
            whole, too large, not an adapter, or an adapter of another model; says which file and why.
    """
    weights_file, config_file = _find(folder, path)
    rank, alpha = _read_config(folder, config_file)
    if rank is not None and rank > layers.max_rank:
        raise invalid(_FIELD, f'"{config_file}" has rank {rank}, the limit is {layers.max_rank} (lora_max_rank)')
    columns = {
        target: (layer.inputs, size)
        for layer in layers.layers
        for target, size in zip(layer.targets, layer.sizes, strict=True)
    }
    largest = sum(inputs + outputs for inputs, outputs in columns.values()) * layers.max_rank * 4 + _OVERHEAD_BYTES
    data = read_guarded(folder, weights_file, largest, _FIELD)
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(repr((rank, alpha)).encode())
    if weights_file.endswith(".safetensors"):
        tensors, _ = load_tensors(data, weights_file, _FIELD)
    else:
        tensors = _unpickle(data, weights_file, largest)
    del data
    return _check(tensors, weights_file, rank, alpha, columns, layers), digest.hexdigest()


def _find(folder: Path, path: str) -> tuple[str, str]:
    """The weights' and the configuration's file, as names for `read_guarded`."""
    if path.endswith(_SUFFIXES):
        return path, str(PurePosixPath(path).with_name(_CONFIG))
    # Only a name is chosen here: whatever lies under it is opened, and checked, by `read_guarded`.
    present = [name for name in _WEIGHTS if os.path.isfile(folder / path / name)] if ".." not in path else []
    return str(PurePosixPath(path) / (present or _WEIGHTS)[0]), str(PurePosixPath(path) / _CONFIG)


def _read_config(folder: Path, file: str) -> tuple[int | None, float]:
    """Rank, if it is given, and alpha."""
    try:
        config = json.loads(read_guarded(folder, file, _MAX_CONFIG_BYTES, _FIELD))
    except (ValueError, RecursionError) as error:
        raise invalid(_FIELD, f'"{file}" is not valid JSON: {error}') from None
    if isinstance(config, dict):
        config = config.get("lora_config")
    if not isinstance(config, dict):
        raise invalid(_FIELD, f'"{file}" must hold an object "lora_config"')
    rank, alpha = config.get("r", config.get("rank")), config.get("alpha", config.get("lora_alpha"))
    if rank is not None and (type(rank) is not int or rank < 1):
        raise invalid(_FIELD, f'"{file}": lora_config.r must be a positive integer, got {rank!r:.40}')
    if type(alpha) not in (int, float) or not 0 < alpha <= _MAX_ALPHA:
        message = f"lora_config.alpha must be a positive number up to {_MAX_ALPHA:g}, got {alpha!r:.40}"
        raise invalid(_FIELD, f'"{file}": {message}')
    return rank, float(alpha)


def _unpickle(data: bytes, file: str, largest: int) -> dict[str, torch.Tensor]:
    """The tensors of a file of torch.save: tensors only, and no more than there are bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise invalid(_FIELD, f'"{file}" is not a file of torch.save: {error}') from None
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > largest:
        raise invalid(_FIELD, f'"{file}" is compressed; torch.save does not do that')
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's message is advice on how to load it all the same
        raise invalid(_FIELD, f'"{file}" is damaged, or holds more than tensors') from None
    except Exception as error:  # torch.load raises many kinds
        raise invalid(_FIELD, f'"{file}" cannot be loaded: {str(error).splitlines()[0]:.200}') from None
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise invalid(_FIELD, f'"{file}" must hold tensors by name')
    return state


def _check(
    tensors: dict[str, torch.Tensor],
    file: str,
    rank: int | None,
    alpha: float,
    columns: dict[str, tuple[int, int]],
    layers: LoraLayers,
) -> AdapterWeights:
    matrices: dict[str, dict[str, torch.Tensor]] = {"lora_A": {}, "lora_B": {}}
    for name, tensor in tensors.items():
        target, _, kind = strip_adapter_prefixes(name).rpartition(".")
        if kind not in matrices:
            raise invalid(_FIELD, f'"{file}": "{name:.200}" is neither a .lora_A nor a .lora_B')
        if target not in columns:
            raise invalid(
                _FIELD,
                f'"{file}": "{name:.200}" is for no layer that takes adapters (see the settings lora_target_...)',
            )
        if target in matrices[kind]:
            raise invalid(_FIELD, f'"{file}": there are two tensors for "{target}.{kind}"')
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise invalid(_FIELD, f'"{file}": "{name}" is no tensor of float32, float16 or bfloat16')
        matrices[kind][target] = tensor
    a, b = matrices["lora_A"], matrices["lora_B"]
    if not a:
        raise invalid(_FIELD, f'"{file}" holds no adapter')
    if lone := sorted(a.keys() ^ b.keys()):
        raise invalid(_FIELD, f'"{file}": "{lone[0]}" has only one of lora_A and lora_B')
    first = next(iter(a.values()))
    rank = rank or (first.size(0) if first.dim() == 2 else 0)
    if not 1 <= rank <= layers.max_rank:
        raise invalid(_FIELD, f'"{file}" has rank {rank}, the limit is {layers.max_rank} (lora_max_rank)')
    for target, (inputs, outputs) in columns.items():
        if target not in a:
            continue
        for kind, expected in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            shape = tuple(matrices[kind][target].shape)
            if shape != expected:
                raise invalid(
                    _FIELD, f'"{file}": "{target}.{kind}" has shape {list(shape)}, of this model it is {list(expected)}'
                )
    # Only now may anything be computed with them: a tensor of any shape can be written in a few bytes.
    weights = layers.pack(rank, alpha, a, b)
    if not torch.stack(torch.aminmax(weights.row)).isfinite().all():  # a NaN is both; 40 times as fast as each value's
        for kind, scale in (("lora_A", 1.0), ("lora_B", alpha / rank)):
            for target, tensor in matrices[kind].items():
                if not (tensor.float() * scale).to(layers.dtype).isfinite().all():
                    raise invalid(_FIELD, f'"{file}": "{target}.{kind}" has values that are not finite')
    return weights
