"""The AudioVAE: trained to reconstruct, then its decoder against discriminators; made with the official classes."""

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from train_small.audio_losses import HALF_FILTER, RATIO, ReconstructionLoss, downsample, low_pass, upsample
from train_small.corpus import Corpus, load_corpus
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
FRAME = 640
"""Samples at 16 kHz of one latent frame."""
_MARGIN = HALF_FILTER // RATIO * 2
"""Samples at 16 kHz on either side of a crop that resampling needs."""
_RELOAD_S = 30.0
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
    """

    batch: int = 24
    frames: int = 32
    rate: float = 1e-3
    noise: float = 0.4


class Crops:
    """Random crops of a corpus that may still be growing; one in four starts where a sentence starts."""

    def __init__(self, folder: Path, settings: VaeSettings, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._batch, self._length = settings.batch, settings.frames * FRAME + 2 * _MARGIN
        self._complete, self._looked = False, 0.0
        self._reload()

    def make(self) -> Batch:
        """audio: [B, 1, crop and the margins on both sides], 1 is full scale."""
        if not self._complete and time.monotonic() - self._looked > _RELOAD_S:
            self._reload()
        last = len(self._audio) - self._length - 1
        begin = torch.randint(0, last, (self._batch,), device=self._device)
        sentence = torch.randint(0, len(self._begins), (self._batch,), device=self._device)
        is_begin = torch.arange(self._batch, device=self._device) % 4 == 0
        begin = torch.where(is_begin, (self._begins[sentence] - _MARGIN).clamp(0, last), begin)
        index = begin[:, None] + torch.arange(self._length, device=self._device)
        return {"audio": self._audio[index].float()[:, None] / 32768}

    def _reload(self) -> None:
        while True:
            corpus, self._complete = load_corpus(self._folder)
            self._looked = time.monotonic()
            if len(corpus.audio) > self._length + 1:
                break
            if self._complete:
                raise ValueError(f"{self._folder} has less audio than one crop")
            time.sleep(1)
        self._audio = torch.from_numpy(corpus.audio).to(self._device)
        self._begins = torch.from_numpy(corpus.offsets[:-1]).to(self._device)


def load_vae(folder: Path, device: torch.device) -> AudioVAE:
    """The AudioVAE of a checkpoint's folder, in float32."""
    vae = AudioVAE(AudioVAEConfig(**json.loads((folder / "config.json").read_text())["audio_vae_config"]))
    vae.load_state_dict(torch.load(folder / "audiovae.pth", map_location="cpu", weights_only=True)["state_dict"])
    return vae.float().to(device).eval()


def save_vae(vae: AudioVAE, path: Path) -> None:
    """Write audiovae.pth, in half precision."""
    weights = {name: t.half() if t.is_floating_point() else t for name, t in vae.state_dict().items()}
    torch.save({"state_dict": {name: tensor.cpu() for name, tensor in weights.items()}}, path)


def train_vae(
    corpus: Path, out: Path, budget: Budget, settings: VaeSettings, device: torch.device, seed: int
) -> AudioVAE:
    """Train encoder and decoder to reconstruct; the encoder's latents get mean 0 and variance 1 per channel."""
    torch.manual_seed(seed)
    vae = AudioVAE(AudioVAEConfig(**CONFIG)).to(device)
    parameters = [p for name, p in vae.named_parameters() if "fc_logvar" not in name]
    optimizer = make_optimizer(parameters, (0.8, 0.99), 1e-3)
    figures = ["mel", "linear", "complex", "wave"]
    trainer = Trainer("vae", out, vae, parameters, [(optimizer, settings.rate)], figures, seed)
    crops, losses, taps = Crops(corpus, settings, device), ReconstructionLoss().to(device), low_pass(device)
    rate = torch.tensor([CONFIG["out_sample_rate"]], dtype=torch.int32, device=device)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        target = upsample(batch["audio"], taps)[..., RATIO * _MARGIN : -RATIO * _MARGIN]
        mu = vae.encoder.fc_mu(vae.encoder.block(batch["audio"][..., _MARGIN:-_MARGIN]))
        mean = mu.mean((0, 2), keepdim=True)
        deviation = mu.std((0, 2), keepdim=True) + 1e-4
        parts = losses(vae.decode(_noised((mu - mean) / deviation, settings.noise), rate), target)
        drift = mean.square().mean() + (deviation - 1).square().mean()
        (parts["loss"] + 1e-3 * drift).backward()
        nn.utils.clip_grad_norm_(parameters, 5.0, foreach=True)
        optimizer.step()
        return torch.stack([parts[name].detach() for name in figures])

    with fast(vae, device):
        trainer.run({"crops": Kind(1.0, crops.make, step)}, budget)
    trainer.take_average()
    vae.eval()
    _normalize_latents(vae, load_corpus(corpus)[0], device)
    return vae


def train_decoder(
    vae: AudioVAE, corpus: Path, out: Path, budget: Budget, settings: VaeSettings, device: torch.device, seed: int
) -> None:
    """Go on with the decoder alone, against discriminators. The latents stay what they are."""
    torch.manual_seed(seed)
    discriminators = Discriminators().to(device)
    for parameter in vae.encoder.parameters():
        parameter.requires_grad_(False)
    parameters = list(vae.decoder.parameters())
    adversaries = list(discriminators.parameters())
    optimizer = make_optimizer(parameters, (0.8, 0.99), 1e-3)
    their_optimizer = make_optimizer(adversaries, (0.8, 0.99), 1e-3)
    figures = ["mel", "linear", "complex", "wave", "fooling", "features", "discriminators"]
    both = nn.ModuleDict({"vae": vae, "discriminators": discriminators})
    rates = [(optimizer, settings.rate), (their_optimizer, settings.rate)]
    trainer = Trainer("decoder", out, both, parameters, rates, figures, seed)
    crops, losses, taps = Crops(corpus, settings, device), ReconstructionLoss().to(device), low_pass(device)
    rate = torch.tensor([CONFIG["out_sample_rate"]], dtype=torch.int32, device=device)

    def judge(audio: torch.Tensor) -> list:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return discriminators(audio)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        their_optimizer.zero_grad(set_to_none=True)
        recorded = batch["audio"][..., _MARGIN:-_MARGIN]
        target = upsample(batch["audio"], taps)[..., RATIO * _MARGIN : -RATIO * _MARGIN]
        with torch.no_grad():
            mu = vae.encoder.fc_mu(vae.encoder.block(recorded))
        made = vae.decode(_noised(mu, settings.noise), rate)
        heard = downsample(made, taps)
        against = discriminators_loss(judge(recorded), judge(heard.detach()))
        against.backward()
        nn.utils.clip_grad_norm_(adversaries, 10.0, foreach=True)
        their_optimizer.step()
        for parameter in adversaries:
            parameter.requires_grad_(False)
        parts = losses(made, target)
        with torch.no_grad():
            real = judge(recorded)
        fooling, features = decoders_losses(real, judge(heard))
        (parts["loss"] + _FOOLING * fooling + _FEATURES * features).backward()
        for parameter in adversaries:
            parameter.requires_grad_(True)
        nn.utils.clip_grad_norm_(parameters, 5.0, foreach=True)
        optimizer.step()
        shown = [*(parts[name] for name in figures[:4]), fooling, features, against]
        return torch.stack([value.detach() for value in shown])

    with fast(vae, device):
        trainer.run({"crops": Kind(1.0, crops.make, step)}, budget)
    trainer.take_average()
    vae.eval()


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
