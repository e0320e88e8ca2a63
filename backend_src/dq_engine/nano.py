"""The only file that touches nano-vllm-voxcpm's private parts: model classes, configuration, tokenizer, weight loading.

The package is installed without its dependencies and refuses to import without some that a CPU machine lacks. Nothing
that the engine uses of it calls them (the engine brings its own attention and its own decoder), so where one is missing
a stand-in takes its place for the time of the import.
"""

import contextlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dq_engine.kernels.lora import AdapterRows, lora_add

_GPU_ONLY = ("flash_attn", "triton", "triton.language", "torchaudio", "librosa")


class _StandIn(types.ModuleType):
    """A module whose every attribute is a decorator that changes nothing."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args else lambda decorated: decorated


def _is_installed(name: str) -> bool:
    """Whether there is such a package; a mere folder of that name on sys.path is none."""
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
    from nanovllm_voxcpm.engine.lora_manager import LoRARuntime, LoRARuntimeEntry
    from nanovllm_voxcpm.layers.audio_vae_v2 import (
        AudioVAEV2,
        CausalConv1d,
        CausalDecoderBlock,
        CausalTransposeConv1d,
        NoiseBlock,
        Snake1d,
    )
    from nanovllm_voxcpm.layers.lora import iter_lora_modules
    from nanovllm_voxcpm.lora import LoRAAvailability, set_backend_for_testing
    from nanovllm_voxcpm.models.voxcpm.config import AudioVAEConfig, VoxCPMConfig
    from nanovllm_voxcpm.models.voxcpm2.config import AudioVAEV2Config, LoRAConfig, VoxCPM2Config
    from nanovllm_voxcpm.models.voxcpm2.lora_loader import _strip_known_prefixes as strip_adapter_prefixes
    from nanovllm_voxcpm.models.voxcpm2.model import (
        Cpm4Attention,
        Cpm4DecoderLayer,
        Cpm4Model,
        VoxCPM2LocDiT,
        VoxCPM2Model,
    )
    from nanovllm_voxcpm.models.voxcpm2.utils import mask_multichar_chinese_tokens
    from nanovllm_voxcpm.utils.context import LoRAContext, reset_lora_context, set_lora_context

__all__ = [
    "AudioVAEV2",
    "AudioVAEV2Config",
    "CausalConv1d",
    "CausalDecoderBlock",
    "CausalTransposeConv1d",
    "Cpm4Attention",
    "Cpm4DecoderLayer",
    "Cpm4Model",
    "LoRAConfig",
    "LoRARuntime",
    "LoRARuntimeEntry",
    "LoraLayer",
    "NoiseBlock",
    "Snake1d",
    "VoxCPM2Config",
    "VoxCPM2LocDiT",
    "VoxCPM2Model",
    "adapter_rows",
    "as_second_generation",
    "causal_padding",
    "copy_weight",
    "lora_layers",
    "mask_multichar_chinese_tokens",
    "pad_as_first_generation",
    "strip_adapter_prefixes",
]


def as_second_generation(raw: dict) -> VoxCPM2Config:
    """The configuration of a VoxCPM 0.5B or 1.5 as that of a VoxCPM2 of the same sizes.

    Raises:
        ValidationError: of pydantic; `raw` describes no such model.
    """
    config = VoxCPMConfig.model_validate(raw)
    vae = (config.audio_vae_config or AudioVAEConfig()).model_dump()
    vae |= {"out_sample_rate": vae["sample_rate"], "sr_bin_boundaries": None}
    return VoxCPM2Config.model_validate({**config.model_dump(), "audio_vae_config": vae})


def pad_as_first_generation(vae: AudioVAEV2) -> None:
    """Give an encoder's strided convolutions the padding of VoxCPM 0.5B and 1.5: one more where the stride is odd."""
    for module in vae.encoder.modules():
        if isinstance(module, CausalConv1d):
            module._CausalConv1d__output_padding = 0


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
    expected = _whole_shape(model.get_submodule(target.rpartition(".")[0]), parameter, *arguments)
    if tuple(value.shape) != expected:
        raise ValueError(f"has shape {list(value.shape)}, config.json makes it {list(expected)}")
    if hasattr(parameter, "weight_loader"):
        parameter.weight_loader(parameter, value, *arguments)
    else:
        parameter.data.copy_(value)
    return target


def _whole_shape(module: nn.Module, parameter: nn.Parameter, part: str | int | None = None) -> tuple[int, ...]:
    """The shape in a checkpoint, where nothing is packed nor shared out to several processes.

    Args:
        part: of a packed matrix, which one.
    """
    processes = getattr(module, "tp_size", 1)
    if isinstance(part, int):
        return (module.output_sizes[part], *parameter.shape[1:])
    if part is not None:
        heads = module.num_heads if part == "q" else module.num_kv_heads
        return (heads * module.head_size * processes, *parameter.shape[1:])
    shape = list(parameter.shape)
    if processes > 1 and (dim := getattr(module, "tp_dim", 0)) is not None:  # an embedding is shared out by rows
        shape[dim] *= processes
    return tuple(shape)


class _LoraBackend:
    """What nano-vllm-voxcpm's LoRA layers call to add the adapters: `kernels.lora`, on any device."""

    def availability(self) -> LoRAAvailability:
        return LoRAAvailability(available=True)

    def add_lora(self, y_slices, x, lora_a_slices, lora_b_slices, *, metadata, y_packed=None, **_):
        """`metadata` is an `AdapterRows` (see `adapter_rows`), the matrices are views of those given to `bind`."""
        y = y_slices[0] if y_packed is None else y_packed
        slots, rank, inputs = lora_a_slices[0].shape
        sizes = [part.size(1) for part in lora_b_slices]
        stride = lora_a_slices[0].stride(0)
        a = lora_a_slices[0].as_strided((slots, len(sizes), rank, inputs), (stride, rank * inputs, inputs, 1))
        b = lora_b_slices[0].as_strided((slots, sum(sizes), rank), (stride, rank, 1))
        lora_add(y, x, a, b, sizes, metadata)
        return y_slices


set_backend_for_testing(_LoraBackend())

_DOMAINS = {
    "enc_to_lm_proj": "patches",
    "lm_to_dit_proj": "heads",
    "res_to_dit_proj": "heads",
    "feat_decoder": "diffusion",
}
"""The layers whose rows are not the tokens of the language models."""
_model_numbers = itertools.count()


@dataclass(frozen=True)
class LoraLayer:
    """One linear layer of nano-vllm-voxcpm that takes adapters.

    Args:
        module: the layer.
        targets: the projections in it by their names in an adapter, in the order of its columns.
        sizes: columns of each.
        inputs: its input's width.
    """

    module: nn.Module
    targets: list[str]
    sizes: list[int]
    inputs: int

    def bind(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Take the adapters' matrices from here.

        Args:
            a: [slots, projections, rank, inputs]; all but the slots contiguous, as in b.
            b: [slots, sum(sizes), rank], with the same stride between slots.
        """
        module = self.module
        # The layer leaves itself out where it believes that no slot has a rank.
        module._effective_lora_rank_values = [a.size(2)]
        if not hasattr(module, "lora_targets"):
            module.lora_A, module.lora_B = a[:, 0], b
            return
        module.lora_A = a.transpose(0, 1)
        for target, part in zip(module.lora_targets, b.split(self.sizes, dim=1), strict=True):
            setattr(module, f"lora_B_{target}", part)


def lora_layers(model: VoxCPM2Model) -> tuple[str, list[LoraLayer]]:
    """A key for `adapter_rows`, and the LoRA layers of a model that was built with a `LoRAConfig`, without matrices.

    Until `LoraLayer.bind` has given them matrices, only passes without adapters can run.
    """
    key = f"model {next(_model_numbers)}"
    names = {module: name for name, module in model.named_modules()}
    unpacked = {target: name for name, target in model.packed_modules_mapping.items()}
    layers = []
    for module in iter_lora_modules(model):
        path, _, leaf = names[module].rpartition(".")
        parts = list(getattr(module, "lora_targets", ()))
        leaves = [unpacked[leaf, part] for part in parts] or [leaf]
        if leaf == "qkv_proj":
            sizes = [module.q_size, module.kv_size, module.kv_size]
        else:
            sizes = list(module.shard_output_sizes) if parts else [module.weight.size(0)]
        for parameter in [name for name, _ in module.named_parameters(recurse=False) if name.startswith("lora_")]:
            delattr(module, parameter)
        # A domain of its own for each model: the table of what is under way belongs to the process.
        module.lora_domain = f"{key} {_DOMAINS.get(names[module].split('.')[0], 'tokens')}"
        prefix = f"{path}." if path else ""
        layers.append(LoraLayer(module, [prefix + name for name in leaves], sizes, module.weight.size(1)))
    return key, layers


@contextlib.contextmanager
def adapter_rows(key: str, domains: Mapping[str, AdapterRows]) -> Iterator[None]:
    """Have a model's LoRA layers add adapters, on this thread's passes, until the end of the context.

    Args:
        key: of `lora_layers`.
        domains: the adapters of the rows of "tokens" (both language models), "patches" (the projection behind LocEnc),
            "heads" (the projections before LocDiT) and "diffusion" (LocDiT).
    """
    names = {f"{key} {domain}": rows for domain, rows in domains.items()}
    for name, rows in names.items():
        # The layer compares this one's length with its rows; which rows they are, the backend reads in `rows`.
        lengths = rows.tiles[:1, 0].expand(rows.count)
        context = LoRAContext(token_to_slot=lengths, no_lora_flag=False, num_active_loras=1)
        set_lora_context(context, domain=name)
        context._cached_metadata = rows
    try:
        yield
    finally:
        for name in names:
            reset_lora_context(name)
