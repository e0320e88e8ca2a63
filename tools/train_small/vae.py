"""The AudioVAE: trained to reconstruct, then its decoder against discriminators; made with the official classes."""

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from train_small.audio_losses import RATIO, ReconstructionLoss, downsample, low_pass, upsample
from train_small.checkpoint import write_config
from train_small.corpus import Corpus, load_corpus
from train_small.crops import FRAME, LEAD, MARGIN, Crops
from train_small.discriminators import Discriminators, decoders_losses, discriminators_loss
from train_small.official import AudioVAE, AudioVAEConfig
from train_small.trainer import Batch, Budget, Kind, Trainer, make_optimizer

CONFIG = {
    "encoder_dim": 24,
    "encoder_rates": [2, 5, 8, 8],
    "latent_dim": 64,
    "decoder_dim": 256,
    "decoder_rates": [8, 6, 5, 2, 2, 2],
    "sample_rate": 16000,
    "out_sample_rate": 48000,
    "sr_bin_boundaries": [20000, 30000, 40000],
}
_FIGURES = ("mel", "linear", "complex", "wave")
_BEGINS = 0.4
"""Share of the batches whose crops begin where sentences do, as every stream does."""
_ONSET, _ONSET_WEIGHT = 144, 4.0
"""Samples at 48 kHz of a stream's beginning, 3 ms, that count once more: the spectra hardly see a click there."""
_FITTED, _SILENCE_WEIGHT = 24, 10.0
"""Sentences to which the last convolution is fitted in the end, and how much more their beginnings count."""
_FOOLING, _FEATURES = 1 / 15, 2 / 15
"""Weights beside the reconstruction's 1; the proportions of the Descript audio codec (Kumar and others, 2023)."""


@dataclass(frozen=True)
class VaeSettings:
    """Of either stage.

    Args:
        batch: crops in a step.
        frames: latent frames in a crop.
        rate: highest learning rate.
        noise: most noise added to the latents, whose variance is 1: what the language models make is not exact.
        adversaries: of the decoder's stage: it is trained against discriminators, which take most of a CPU's time.
    """

    batch: int = 24
    frames: int = 32
    rate: float = 1e-3
    noise: float = 0.4
    adversaries: bool = True


def load_vae(folder: Path, device: torch.device) -> AudioVAE:
    """The AudioVAE of a checkpoint's folder, in float32."""
    vae = AudioVAE(AudioVAEConfig(**json.loads((folder / "config.json").read_text())["audio_vae_config"]))
    vae.load_state_dict(_weights(folder))
    return vae.float().to(device).eval()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "audiovae.pth", map_location="cpu", weights_only=True)["state_dict"]


def save_vae(vae: AudioVAE, path: Path) -> None:
    """Write audiovae.pth, in half precision."""
    weights = {name: t.half() if t.is_floating_point() else t for name, t in vae.state_dict().items()}
    torch.save({"state_dict": {name: tensor.cpu() for name, tensor in weights.items()}}, path)


def train_vae(
    checkpoint: Path, corpus: Path, out: Path, budget: Budget, settings: VaeSettings, device: torch.device, seed: int
) -> None:
    """Train encoder and decoder to reconstruct and write audiovae.pth; weights that the checkpoint has are the start.

    The encoder's latents get mean 0 and variance 1 per channel. They move: models trained before have to go on.

    Raises:
        RuntimeError: the checkpoint's AudioVAE has other layers.
    """
    torch.manual_seed(seed)
    vae = AudioVAE(AudioVAEConfig(**CONFIG))
    if (checkpoint / "audiovae.pth").exists():
        vae.load_state_dict(_weights(checkpoint))
    vae = vae.float().to(device)
    parameters = [p for name, p in vae.named_parameters() if "fc_logvar" not in name]
    optimizer = make_optimizer(parameters, (0.8, 0.99), 1e-3)
    trainer = Trainer("vae", out, vae, parameters, [(optimizer, settings.rate)], list(_FIGURES), seed)
    losses, taps = ReconstructionLoss().to(device), low_pass(device)
    rate = torch.tensor([CONFIG["out_sample_rate"]], dtype=torch.int32, device=device)

    def step(batch: Batch, lead: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        recorded, target = _recorded(batch), _target(batch, taps)
        mu = vae.encoder.fc_mu(vae.encoder.block(recorded))
        mean = mu.mean((0, 2), keepdim=True)
        deviation = mu.std((0, 2), keepdim=True) + 1e-4
        made = vae.decode(_noised((mu - mean) / deviation, settings.noise), rate)
        parts = _distance(losses, made, target, lead)
        drift = mean.square().mean() + (deviation - 1).square().mean()
        (parts["loss"] + 1e-3 * drift).backward()
        nn.utils.clip_grad_norm_(parameters, 5.0, foreach=True)
        optimizer.step()
        return torch.stack([parts[name].detach() for name in _FIGURES])

    with fast(vae, device):
        trainer.run(_kinds(Crops(corpus, settings.batch, settings.frames, device), step), budget)
    trainer.take_average()
    vae.eval()
    loaded, _ = load_corpus(corpus)
    _normalize_latents(vae, loaded, device)
    _begin_silently(vae, loaded, device)
    write_config(checkpoint, CONFIG)
    save_vae(vae, checkpoint / "audiovae.pth")


def train_decoder(
    vae: AudioVAE, corpus: Path, out: Path, budget: Budget, settings: VaeSettings, device: torch.device, seed: int
) -> None:
    """Go on with the decoder alone, against discriminators if so set. The latents stay what they are."""
    torch.manual_seed(seed)
    for parameter in vae.encoder.parameters():
        parameter.requires_grad_(False)
    parameters = list(vae.decoder.parameters())
    optimizer = make_optimizer(parameters, (0.8, 0.99), 1e-3)
    figures, both, optimizers = list(_FIGURES), nn.ModuleDict({"vae": vae}), [(optimizer, settings.rate)]
    if settings.adversaries:
        both["discriminators"] = discriminators = Discriminators().to(device)
        adversaries = list(discriminators.parameters())
        their_optimizer = make_optimizer(adversaries, (0.8, 0.99), 1e-3)
        optimizers.append((their_optimizer, settings.rate))
        figures += ["fooling", "features", "discriminators"]
    trainer = Trainer("decoder", out, both, parameters, optimizers, figures, seed)
    losses, taps = ReconstructionLoss().to(device), low_pass(device)
    rate = torch.tensor([CONFIG["out_sample_rate"]], dtype=torch.int32, device=device)

    def judge(audio: torch.Tensor) -> list:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return discriminators(audio)

    def teach_adversaries(real: torch.Tensor, heard: torch.Tensor) -> torch.Tensor:
        their_optimizer.zero_grad(set_to_none=True)
        against = discriminators_loss(judge(real), judge(heard))
        against.backward()
        nn.utils.clip_grad_norm_(adversaries, 10.0, foreach=True)
        their_optimizer.step()
        return against

    def ask_adversaries(real: torch.Tensor, heard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            features = judge(real)
        return decoders_losses(features, judge(heard))

    def step(batch: Batch, lead: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        recorded, target = _recorded(batch), _target(batch, taps)
        with torch.no_grad():
            mu = vae.encoder.fc_mu(vae.encoder.block(recorded))
        made = vae.decode(_noised(mu, settings.noise), rate)
        parts = _distance(losses, made, target, lead)
        loss, shown = parts["loss"], [parts[name] for name in _FIGURES]
        if settings.adversaries:
            real, heard = recorded[..., lead * FRAME :], downsample(made[..., RATIO * lead * FRAME :], taps)
            against = teach_adversaries(real, heard.detach())
            for parameter in adversaries:
                parameter.requires_grad_(False)
            fooling, features = ask_adversaries(real, heard)
            loss = loss + _FOOLING * fooling + _FEATURES * features
            shown += [fooling, features, against]
        loss.backward()
        if settings.adversaries:
            for parameter in adversaries:
                parameter.requires_grad_(True)
        nn.utils.clip_grad_norm_(parameters, 5.0, foreach=True)
        optimizer.step()
        return torch.stack([value.detach() for value in shown])

    with fast(vae, device):
        trainer.run(_kinds(Crops(corpus, settings.batch, settings.frames, device), step), budget, warm_up=100)
    trainer.take_average()
    vae.eval()
    _begin_silently(vae, load_corpus(corpus)[0], device)


def _kinds(crops: Crops, step: Callable[[Batch, int], torch.Tensor]) -> dict[str, Kind]:
    """Crops from the beginning of a stream, and from anywhere with LEAD frames before them."""
    return {
        "begins": Kind(_BEGINS, crops.begins, functools.partial(step, lead=0)),
        "middles": Kind(1 - _BEGINS, crops.middles, functools.partial(step, lead=LEAD)),
    }


def _recorded(batch: Batch) -> torch.Tensor:
    return batch["audio"][..., MARGIN:-MARGIN]


def _target(batch: Batch, taps: torch.Tensor) -> torch.Tensor:
    return upsample(batch["audio"], taps)[..., RATIO * MARGIN : -RATIO * MARGIN]


def _distance(
    losses: ReconstructionLoss, made: torch.Tensor, target: torch.Tensor, lead: int
) -> dict[str, torch.Tensor]:
    """The reconstruction's losses after the frames that come before the crop; of a stream's beginning its onset too."""
    made, target = made[..., RATIO * lead * FRAME :], target[..., RATIO * lead * FRAME :]
    parts = losses(made, target)
    onset = (made - target)[..., :_ONSET].square().mean().sqrt() / target.square().mean().sqrt()
    return parts if lead else parts | {"loss": parts["loss"] + _ONSET_WEIGHT * onset}


def _noised(latents: torch.Tensor, most: float) -> torch.Tensor:
    """Each crop with its own amount of noise."""
    amount = most * torch.rand(len(latents), 1, 1, device=latents.device)
    return latents + amount * torch.randn_like(latents)


def fast(vae: AudioVAE, device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which the AudioVAE's layers run through the kernels of fast_layers.py, if it is on a GPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from train_small.fast_layers import fast_layers  # needs Triton

    return fast_layers(vae)


@torch.no_grad()
def _normalize_latents(vae: AudioVAE, corpus: Corpus, device: torch.device) -> None:
    """Fold the latents' mean and deviation over some sentences into the last layer of the encoder."""
    audio = torch.from_numpy(corpus.audio).to(device)
    pieces = zip(corpus.offsets[:300], corpus.offsets[1:301], strict=False)
    latents = torch.cat([vae.encode(audio[a:b].float()[None, None] / 32768, 16000)[0] for a, b in pieces], 1)
    layer = vae.encoder.fc_mu
    layer.weight_g.div_(latents.std(1).view(-1, 1, 1))
    layer.bias.copy_((layer.bias - latents.mean(1)) / latents.std(1))


@torch.no_grad()
def _begin_silently(vae: AudioVAE, corpus: Corpus, device: torch.device) -> None:
    """Fit the last convolution anew, by least squares: to what it gives, and to silence where sentences begin.

    Before it lie activations that are not zero in silence; its bias makes up for them, and where a stream begins there
    is only the bias: a click.
    """
    layer, seen = vae.decoder.model[-2], {}
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], y=output))
    taps, size = layer.kernel_size[0], layer.in_channels * layer.kernel_size[0]
    products = torch.zeros(size + 1, size + 2, dtype=torch.float64)
    for begin, end in zip(corpus.offsets[:_FITTED], corpus.offsets[1:], strict=False):
        audio = torch.from_numpy(corpus.audio[begin:end]).to(device).float()[None, None] / 32768
        vae.decode(vae.encode(audio, CONFIG["sample_rate"]))
        x = nn.functional.pad(seen["x"][0], (taps - 1, 0)).unfold(1, taps, 1).transpose(0, 1).reshape(-1, size)
        rows = torch.cat([x, torch.ones_like(x[:, :1]), seen["y"][0, 0, :, None]], 1).cpu().double()
        rows[:_ONSET, -1] = 0
        rows[:_ONSET] *= _SILENCE_WEIGHT
        products += rows[:, :-1].T @ rows
    handle.remove()
    fitted = torch.linalg.solve(products[:, :-1], products[:, -1]).float().to(device)
    weight = fitted[:-1].view_as(layer.weight_v)
    layer.weight_v.copy_(weight)
    layer.weight_g.copy_(weight.norm().view_as(layer.weight_g))
    layer.bias.copy_(fitted[-1:])
