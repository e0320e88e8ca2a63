"""Loading a checkpoint, of VoxCPM2 or VoxCPM 0.5B and 1.5: config.json, the weights, the AudioVAE's, a tokenizer."""

import contextlib
import json
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.nn.utils import remove_weight_norm
from transformers import LlamaTokenizerFast

from dq_engine.errors import CheckpointError
from dq_engine.lora.layers import LoraLayers, LoraSettings
from dq_engine.nano import (
    AudioVAEV2,
    VoxCPM2Config,
    VoxCPM2Model,
    as_second_generation,
    copy_weight,
    mask_multichar_chinese_tokens,
    pad_as_first_generation,
)

logger = logging.getLogger(__name__)
# transformers tells of a default, and that nothing changes by it, at each start.
logging.getLogger(LlamaTokenizerFast.__module__).addFilter(
    lambda record: not record.getMessage().startswith("You are using the default legacy behaviour of the ")
)

Progress = Callable[[str, float], None]


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    Args:
        config: config.json.
        model: the language models, LocEnc and LocDiT, on the device, in the dtype asked for.
        vae: the AudioVAE in float32 on the device.
        tokenizer: text -> token ids, Chinese tokens of several characters split into single ones.
        mean_mode: LocDiT is conditioned on the length of its Euler steps.
        first_generation: VoxCPM 0.5B or 1.5. `config` is that of a VoxCPM2 of the same sizes then, and the model has no
            `fusion_concat_proj`.
        lora: the model's layers that take adapters, if it was loaded with any.
    """

    config: VoxCPM2Config
    model: VoxCPM2Model
    vae: AudioVAEV2
    tokenizer: Callable[[str], list[int]]
    mean_mode: bool
    first_generation: bool
    lora: LoraLayers | None


def load_checkpoint(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    timesteps: int,
    progress: Progress,
    lora: LoraSettings | None = None,
) -> Checkpoint:
    """Load everything under `path`; `progress` is told what is being done and how far it is (0 to 1).

    Args:
        lora: make room for adapters.

    Raises:
        CheckpointError: something is missing, unreadable or not supported; says which and how to mend it.
    """
    config, mean_mode, first_generation = read_config(path)
    if first_generation and lora is not None:
        raise CheckpointError(f"{path} is a VoxCPM 0.5B or 1.5: adapters are for VoxCPM2; set lora_max_loras to 0")
    progress("loading the tokenizer", 0.0)
    tokenizer = _load_tokenizer(path)
    with _default_dtype(dtype), torch.device(device):
        model = VoxCPM2Model(config, timesteps, None if lora is None else lora.model_config())
    if first_generation:
        model.fusion_concat_proj = None
    layers = None if lora is None else LoraLayers(model, lora)
    _load_weights(model, path, progress)
    progress("loading the AudioVAE", 0.0)
    vae = _load_vae(config, path).to(device)
    if first_generation:
        pad_as_first_generation(vae)
    for module in (model, vae):
        module.eval().requires_grad_(False)
    progress("loading the AudioVAE", 1.0)
    return Checkpoint(config, model, vae, tokenizer, mean_mode, first_generation, layers)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def read_config(path: Path) -> tuple[VoxCPM2Config, bool, bool]:
    """The configuration, mean_mode and first_generation, as in `Checkpoint`."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no config.json: it is not a VoxCPM checkpoint, or its download is incomplete"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again") from None
    architecture = str(raw.get("architecture", "voxcpm")).lower() if isinstance(raw, dict) else "unknown"
    if architecture not in ("voxcpm", "voxcpm2"):
        raise CheckpointError(
            f'{file} has architecture "{architecture}"; "voxcpm2", such as openbmb/VoxCPM2, and "voxcpm" are supported'
        )
    first_generation = architecture == "voxcpm"
    try:
        config = as_second_generation(raw) if first_generation else VoxCPM2Config.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{file} does not describe a {architecture} model: {faults}") from None
    if config.lm_config.use_mup:
        raise CheckpointError(
            f"{file} has lm_config.use_mup = true, which is not supported; use a checkpoint trained without mup"
        )
    if config.audio_vae_config is None:
        raise CheckpointError(f"{file} has no audio_vae_config; take config.json from the checkpoint's own repository")
    mean_mode = (raw if first_generation else raw["dit_config"]).get("dit_mean_mode", False)
    return config, bool(mean_mode), first_generation


def _load_tokenizer(path: Path) -> Callable[[str], list[int]]:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise CheckpointError(f"{path} has no tokenizer.json; copy the tokenizer's files beside config.json")
    try:
        return mask_multichar_chinese_tokens(LlamaTokenizerFast.from_pretrained(path))
    except Exception as error:  # the tokenizer library raises bare exceptions for a broken file
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded ({error}); download it again") from error


def _weight_files(path: Path) -> list[Path]:
    files = sorted(f for f in path.glob("*.safetensors") if f.name != "audiovae.safetensors")
    if files:
        return files
    pickled = sorted(f.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in path.glob(kind))
    pickled = [name for name in pickled if name != "audiovae.pth"]
    if pickled:
        raise CheckpointError(
            f"{path} holds its weights as {', '.join(pickled)}; only safetensors are loaded. Convert once: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    raise CheckpointError(f"{path} has no *.safetensors with the model's weights; its download is incomplete")


def _load_weights(model: VoxCPM2Model, path: Path, progress: Progress) -> None:
    files = _weight_files(path)
    expected = {name for name, _ in model.named_parameters()}
    seen: dict[str, int] = {}
    ignored = []
    progress("loading the weights", 0.0)
    for index, file in enumerate(files):
        try:
            with safe_open(file, "pt", "cpu") as tensors:
                names = list(tensors.keys())
                for count, name in enumerate(names):
                    if (target := _copy(model, file, name, tensors.get_tensor(name))) is None:
                        ignored.append(name)
                    else:
                        seen[target] = seen.get(target, 0) + 1
                    progress("loading the weights", (index + (count + 1) / len(names)) / len(files))
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged ({error}); download it again") from None
    parts = {"qkv_proj": 3, "gate_up_proj": 2}
    missing = [n for n in sorted(expected) if seen.get(n, 0) < parts.get(n.split(".")[-2] if "." in n else "", 1)]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}: "
            "a file of several may be missing, or config.json belongs to another checkpoint"
        )
    if ignored:
        logger.warning(
            "%s: %d tensors that the model does not have were ignored, the first is %s", path, len(ignored), ignored[0]
        )


def _copy(model: VoxCPM2Model, file: Path, name: str, value: torch.Tensor) -> str | None:
    """The parameter that a tensor went into, or None if the model has none for it."""
    try:
        return copy_weight(model, name, value)
    except AttributeError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{file}: {name} {error}; the file and config.json do not belong together") from None


def _load_vae(config: VoxCPM2Config, path: Path) -> AudioVAEV2:
    """The VAE with its weight norm folded into plain weights."""
    safe, pickled = path / "audiovae.safetensors", path / "audiovae.pth"
    try:
        if safe.is_file():
            file = safe
            state = load_file(safe)
        elif pickled.is_file():
            file = pickled
            state = torch.load(pickled, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state)
        else:
            raise CheckpointError(
                f"{path} has neither audiovae.safetensors nor audiovae.pth; its download is incomplete"
            )
    except CheckpointError:
        raise
    except pickle.UnpicklingError:  # torch's message is advice on how to load it all the same
        raise CheckpointError(
            f"the AudioVAE in {path} cannot be loaded: {file.name} is damaged or holds more than tensors; "
            "download it again"
        ) from None
    except Exception as error:  # torch.load and safetensors raise many kinds
        raise CheckpointError(f"the AudioVAE in {path} cannot be loaded ({error}); download it again") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # nano-vllm-voxcpm uses the older form of weight norm
        vae = AudioVAEV2(config=config.audio_vae_config)
    if vae.latent_dim != config.feat_dim:
        raise CheckpointError(
            f"{path}/config.json: audio_vae_config.latent_dim must equal feat_dim ({config.feat_dim})"
        )
    try:
        result = vae.load_state_dict(state, strict=False)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise CheckpointError(f"{file} and config.json do not belong together: {first}") from None
    if result.missing_keys:
        raise CheckpointError(f"{file} lacks {len(result.missing_keys)} tensors, the first is {result.missing_keys[0]}")
    for module in vae.modules():
        if hasattr(module, "weight_g"):
            remove_weight_norm(module)
    return vae
