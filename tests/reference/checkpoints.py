"""Small random checkpoints in the layout of openbmb/VoxCPM2: the official package's own modules, random weights.

The weights are such that a test on them says something: norms, biases and the decoder's activations are not at their
trivial initial values, the audio is neither silent nor clipped, and the stop head fires now and then.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from reference.official import quiet, voxcpm1, voxcpm2
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaTokenizerFast

# As in the real VAE, but a frame is short: 40 samples at 16 kHz become 120 at 48 kHz.
SHORT_FRAMES = {"encoder_dim": 4, "encoder_rates": [2, 5, 4], "decoder_dim": 32, "decoder_rates": [5, 4, 3, 2]}
REAL_FRAMES = {"encoder_dim": 2, "encoder_rates": [2, 5, 8, 8], "decoder_dim": 128, "decoder_rates": [8, 6, 5, 2, 2, 2]}
SMALL = Path(__file__).parents[2] / "models" / "small"
CHINESE_WORDS = ["你好", "世界", "我们", "今天"]


@dataclass(frozen=True)
class Shape:
    """What a random checkpoint looks like.

    Args:
        head_dim: None makes it hidden / heads, in the local models too.
        local_heads: heads of LocEnc and LocDiT; `kv_heads` holds for them too.
        stop_offset: subtracted from the stop head's logit for "stop", whose spread is about 2.
        extended_positions: of the positions' embedding, beyond what it was trained for (LongRoPE's long factors).
        vae: overrides in audio_vae_config.
        first_generation: of VoxCPM 0.5B and 1.5.
    """

    name: str
    seed: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = 16
    residual_layers: int = 1
    residual_no_rope: bool = False
    patch_size: int = 4
    feat_dim: int = 64
    local_hidden: int = 32
    local_heads: int = 4
    local_layers: int = 2
    fsq_dim: int = 8
    vocabulary: int = 400
    mean_mode: bool = False
    extended_positions: bool = False
    stop_offset: float = 2.0
    vae: dict = field(default_factory=lambda: SHORT_FRAMES)
    first_generation: bool = False


SHAPES = [
    Shape("grouped-heads", seed=1),
    Shape(
        "residual-without-rope",
        seed=2,
        hidden=48,
        layers=3,
        heads=6,
        kv_heads=1,
        head_dim=None,
        residual_layers=2,
        residual_no_rope=True,
        patch_size=2,
        feat_dim=16,
        local_hidden=24,
        local_heads=2,
        local_layers=1,
        vocabulary=512,
        vae={**SHORT_FRAMES, "depthwise": False, "cond_type": "add"},
    ),
    Shape(
        "no-grouping-mean-mode",
        seed=3,
        hidden=40,
        layers=1,
        heads=2,
        head_dim=24,
        residual_layers=3,
        residual_no_rope=True,
        patch_size=5,
        feat_dim=24,
        local_hidden=48,
        local_heads=2,
        local_layers=3,
        fsq_dim=16,
        mean_mode=True,
        extended_positions=True,
        vae={**SHORT_FRAMES, "sr_bin_boundaries": None},
    ),
    Shape(
        "real-frames",
        seed=4,
        heads=8,
        kv_heads=4,
        head_dim=8,
        fsq_dim=12,
        vae={**REAL_FRAMES, "cond_out_layer": True},
    ),
]


# VoxCPM 0.5B and 1.5 as they are, but small: patches of 2 frames of 16 kHz, and of 4 of 44.1 kHz.
FIRST_GENERATION = [
    Shape(
        "voxcpm-0.5b",
        seed=11,
        patch_size=2,
        residual_layers=2,
        first_generation=True,
        vae={"encoder_dim": 4, "encoder_rates": [2, 5, 4], "decoder_dim": 32, "decoder_rates": [5, 4, 2]},
    ),
    Shape(
        "voxcpm-1.5",
        seed=12,
        heads=8,
        kv_heads=4,
        head_dim=8,
        mean_mode=True,
        first_generation=True,
        vae={
            "encoder_dim": 4,
            "encoder_rates": [2, 3, 7],
            "decoder_dim": 32,
            "decoder_rates": [7, 3, 2],
            "sample_rate": 44_100,
        },
    ),
]


def make_checkpoint(path: Path, shape: Shape) -> Path:
    """Write a checkpoint: config.json, model.safetensors, audiovae.pth and the tokenizer's two files."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(_config(shape), indent=1))
    _write_tokenizer(path)
    package = voxcpm1 if shape.first_generation else voxcpm2
    config = package.VoxCPMConfig.model_validate(_config(shape))
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(shape.seed)
        first = shape.first_generation
        vae = (voxcpm1.AudioVAE if first else voxcpm2.AudioVAEV2)(config=config.audio_vae_config)
        kind = voxcpm1.VoxCPMModel if first else voxcpm2.VoxCPM2Model
        model = kind(config, LlamaTokenizerFast.from_pretrained(path), vae, device="cpu")
    _randomize_vae(vae, generator)
    _randomize_model(model, shape, generator)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("audio_vae.")}
    save_file(state, path / "model.safetensors")
    torch.save({"state_dict": vae.state_dict()}, path / "audiovae.pth")
    return path


def _config(shape: Shape) -> dict:
    head_dim = shape.head_dim or shape.hidden // shape.heads
    factors = [1.0 + 0.05 * i for i in range(head_dim // 2)]
    local = {"hidden_dim": shape.local_hidden, "ffn_dim": 2 * shape.local_hidden, "num_heads": shape.local_heads}
    # The local models share the language model's rotary factors, so their heads must be as wide.
    local |= {"num_layers": shape.local_layers, "kv_channels": head_dim}
    return {
        "architecture": "voxcpm" if shape.first_generation else "voxcpm2",
        "lm_config": {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": shape.hidden,
            "intermediate_size": 2 * shape.hidden + 8,
            "max_position_embeddings": 1024,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": factors,
                "short_factor": factors[::-1],
                "original_max_position_embeddings": 512 if shape.extended_positions else 1024,
            },
            "vocab_size": shape.vocabulary,
            "use_mup": False,
            "scale_emb": 12,
            "dim_model_base": 256,
            "scale_depth": 1.4,
            **({} if shape.head_dim is None else {"kv_channels": shape.head_dim}),
        },
        "patch_size": shape.patch_size,
        "feat_dim": shape.feat_dim,
        "residual_lm_num_layers": shape.residual_layers,
        "residual_lm_no_rope": shape.residual_no_rope,
        "scalar_quantization_latent_dim": shape.fsq_dim,
        "scalar_quantization_scale": 9,
        "encoder_config": local,
        "dit_config": {**local, "dit_mean_mode": shape.mean_mode, "cfm_config": {"inference_cfg_rate": 2.0}},
        "audio_vae_config": {**shape.vae, "latent_dim": shape.feat_dim},
        "dit_mean_mode": shape.mean_mode,  # where VoxCPM 0.5B and 1.5 have it
        "max_length": 512,
        "device": "cpu",
        "dtype": "float32",
    }


def _write_tokenizer(path: Path) -> None:
    """Single characters, bytes for those it does not know, and a few Chinese words as single tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    tokens += [chr(i) for i in range(ord("!"), ord("~") + 1)]
    tokens += sorted({c for word in CHINESE_WORDS for c in word})
    # A word is a token of its own inside a text, and another at its beginning.
    merges = [tuple(word) for word in CHINESE_WORDS] + [("▁", word) for word in CHINESE_WORDS]
    tokens += ["".join(pair) for pair in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": False, "legacy": True}))


@torch.no_grad()
def _randomize_model(model: torch.nn.Module, shape: Shape, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith("audio_vae."):
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values *= 0.1
        elif parameter.dim() == 2 and "embed_tokens" not in name:
            values /= math.sqrt(parameter.size(1))
        parameter.copy_(values)
    # One unit of the stop predictor is a constant, silu(8) = 8; its weight is the offset of the logits.
    model.stop_proj.weight[0], model.stop_proj.bias[0] = 0, 8.0
    model.stop_head.weight[:] *= 8  # or the logits would hardly differ from one patch to the next
    model.stop_head.weight[:, 0] = torch.tensor([0.0, -shape.stop_offset / torch.nn.functional.silu(torch.tensor(8.0))])


@torch.no_grad()
def _randomize_vae(vae: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in vae.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("alpha"):
            parameter.copy_(torch.exp(0.5 * values))
        elif name.endswith("weight_g"):
            parameter.mul_(torch.exp(0.2 * values))
        elif name.endswith(("bias", "bias_embed.weight", "cond_embed.weight")):
            parameter.copy_(0.1 * values)
    # One pass each way brings every convolution to the level of a trained one: latents of unit size, audio that is
    # neither silent nor clipped, and no activations so large that the sines in between turn an error into noise.
    output = [m for m in vae.decoder.model if isinstance(m, torch.nn.Conv1d)][-1]

    def bring_to_level(module, inputs, result):
        factor = (0.3 if module is output else 1.0) / result.std()
        if module.kernel_size == (1,):  # the last of a residual unit
            factor *= 0.5
        for parameter in (module.weight_g, module.bias):
            parameter *= factor
        return result * factor

    convolutions = [m for m in vae.modules() if hasattr(m, "weight_g")]
    hooks = [module.register_forward_hook(bring_to_level) for module in convolutions]
    vae.encode(torch.randn(1, 1, 100 * vae.chunk_size, generator=generator), vae.sample_rate)
    vae.decode(torch.randn(1, vae.latent_dim, 100, generator=generator))
    for hook in hooks:
        hook.remove()
