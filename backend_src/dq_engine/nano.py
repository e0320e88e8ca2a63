"""The only file that touches nano-vllm-voxcpm's private parts: model classes, configuration, tokenizer, weight loading.

The package is installed without its dependencies and refuses to import without some that a CPU machine lacks. Nothing
that the engine uses of it calls them (the engine brings its own attention and its own decoder), so where one is missing
a stand-in takes its place for the time of the import.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator

import torch
from torch import nn

_GPU_ONLY = ("flash_attn", "triton", "triton.language", "torchaudio", "librosa")


class _StandIn(types.ModuleType):
    """A module whose every attribute is a decorator that changes nothing."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args else lambda decorated: decorated


def _is_installed(name: str) -> bool:
    """Whether there is such a package; a mere folder of that name on sys.path (tests/triton, say) is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


@contextlib.contextmanager
def _standing_in(names: tuple[str, ...]) -> Iterator[None]:
    absent = [name for name in names if not _is_installed(name.partition(".")[0])]
    before = {name: sys.modules[name] for name in absent if name in sys.modules}
    for name in absent:
        module = _StandIn(name)
        module.__path__ = []
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in absent:
            setattr(sys.modules[parent], child, module)
    # SiluAndMul and snake are decorated with torch.compile; the engine replaces both, and a CPU cannot compile them.
    compile_, torch.compile = torch.compile, lambda function: function
    try:
        yield
    finally:
        torch.compile = compile_
        for name in absent:
            del sys.modules[name]
        sys.modules.update(before)


import transformers  # noqa: E402, F401  first: it looks for optional packages when it is imported

with _standing_in(_GPU_ONLY):
    from nanovllm_voxcpm.layers.audio_vae_v2 import (
        AudioVAEV2,
        CausalConv1d,
        CausalDecoderBlock,
        CausalTransposeConv1d,
        NoiseBlock,
        Snake1d,
    )
    from nanovllm_voxcpm.models.voxcpm2.config import AudioVAEV2Config, VoxCPM2Config
    from nanovllm_voxcpm.models.voxcpm2.model import (
        Cpm4Attention,
        Cpm4DecoderLayer,
        Cpm4Model,
        VoxCPM2LocDiT,
        VoxCPM2Model,
    )
    from nanovllm_voxcpm.models.voxcpm2.utils import mask_multichar_chinese_tokens

__all__ = [
    "AudioVAEV2",
    "AudioVAEV2Config",
    "CausalConv1d",
    "CausalDecoderBlock",
    "CausalTransposeConv1d",
    "Cpm4Attention",
    "Cpm4DecoderLayer",
    "Cpm4Model",
    "NoiseBlock",
    "Snake1d",
    "VoxCPM2Config",
    "VoxCPM2LocDiT",
    "VoxCPM2Model",
    "causal_padding",
    "copy_weight",
    "mask_multichar_chinese_tokens",
]


def causal_padding(conv: CausalConv1d) -> int:
    """Samples of the past that a causal convolution sees before its first input."""
    return conv._CausalConv1d__padding * 2 - conv._CausalConv1d__output_padding


def copy_weight(model: VoxCPM2Model, name: str, value: torch.Tensor) -> str:
    """Copy one tensor of a checkpoint into the model, where q, k, v and gate, up are packed into one matrix each.

    Args:
        name: the tensor's name in the checkpoint (the official model's names).

    Returns:
        The name of the parameter it went into.

    Raises:
        AttributeError: the model has no such parameter.
        ValueError: the shape does not fit.
    """
    part = next((p for p in model.packed_modules_mapping if p in name.split(".")), None)
    target, arguments = name, ()
    if part is not None:
        packed, shard = model.packed_modules_mapping[part]
        target, arguments = name.replace(f".{part}.", f".{packed}."), (shard,)
    parameter = model.get_parameter(target)
    expected = tuple(parameter.shape)
    if arguments:
        expected = _shard_shape(model.get_submodule(target.rpartition(".")[0]), parameter, *arguments)
    if tuple(value.shape) != expected:
        raise ValueError(f"has shape {list(value.shape)}, config.json makes it {list(expected)}")
    if hasattr(parameter, "weight_loader"):
        parameter.weight_loader(parameter, value, *arguments)
    else:
        parameter.data.copy_(value)
    return target


def _shard_shape(module: nn.Module, parameter: nn.Parameter, shard: str | int) -> tuple[int, ...]:
    if isinstance(shard, int):
        rows = module.output_sizes[shard]
    else:
        rows = (module.num_heads if shard == "q" else module.num_kv_heads) * module.head_size
    return (rows, *parameter.shape[1:])
