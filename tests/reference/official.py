"""The official `voxcpm` 2.0.3 in float32 on the CPU, fed with our noise: what the engine is measured against."""

import contextlib
import io
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from torchaudio_standing_in import torchaudio_standing_in

from dq_engine.noise import patch_noise


@contextlib.contextmanager
def quiet():
    """The package reports on both outputs as it goes along, and uses what torch has deprecated since."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with torchaudio_standing_in(), quiet():
    import voxcpm.model.voxcpm as voxcpm1
    import voxcpm.model.voxcpm2 as voxcpm2
    from voxcpm import VoxCPM

voxcpm1.tqdm = voxcpm2.tqdm = lambda iterable: iterable  # a progress bar for every request would bury the tests' output


@dataclass(frozen=True)
class Spoken:
    """What the official model made of one request.

    Args:
        latents: float32 [frames, feat_dim], generated; without the prompt.
        audio: float32 [n], the offline decode.
        finish_reason: "stop" if the model ended it, "length" if the limit did.
        quantization_margin: the smallest distance of a quantized value from the middle between two levels, in levels.
            Below the error of float32 the two engines may round differently, and all after that differs.
        stop_margin: the smallest distance between the two logits of the stop head.
    """

    @property
    def is_clear(self) -> bool:
        """Whether no decision was so close that an error of float32 could turn it."""
        return self.quantization_margin > 2e-5 and self.stop_margin > 1e-3

    latents: np.ndarray
    audio: np.ndarray
    finish_reason: str
    quantization_margin: float
    stop_margin: float


class Official:
    """One checkpoint in the official package.

    Args:
        path: its directory; config.json must say float32.
    """

    def __init__(self, path: Path) -> None:
        self.first_generation = json.loads((path / "config.json").read_text())["architecture"] == "voxcpm"
        kind = voxcpm1.VoxCPMModel if self.first_generation else voxcpm2.VoxCPM2Model
        with quiet():
            self.model = kind.from_local(str(path), optimize=False, device="cpu")
        assert self.model.config.dtype == "float32"
        self.patch_size, self.feat_dim = self.model.patch_size, self.model.feat_dim
        self._frame_samples = self.model.chunk_size if self.first_generation else self.model._decode_chunk_size
        self.patch_samples = self.patch_size * self._frame_samples
        # The pipeline around the model, without the denoiser that its constructor would download.
        self._pipeline = object.__new__(VoxCPM)
        self._pipeline.tts_model, self._pipeline.denoiser, self._pipeline.text_normalizer = self.model, None, None

    def tokens(self, text: str) -> list[int]:
        return self.model.text_tokenizer(text)

    @torch.inference_mode()
    def encode(self, recording: Path, purpose: str) -> np.ndarray:
        """Latents of a recording, float32 [frames, feat_dim]; purpose "reference" or "prompt"."""
        if self.first_generation:
            return self._encode_prompt(recording)
        padding = {"reference": "right", "prompt": "left"}[purpose]
        return self.model._encode_wav(str(recording), padding_mode=padding).reshape(-1, self.feat_dim).numpy()

    def _encode_prompt(self, recording: Path) -> np.ndarray:
        """As in VoxCPM 1's `build_prompt_cache`, for a mono recording at the model's rate, without torchaudio."""
        samples, rate = soundfile.read(recording, dtype="float32")
        assert rate == self.model.sample_rate and samples.ndim == 1
        missing = -len(samples) % self.patch_samples
        wave = torch.nn.functional.pad(torch.from_numpy(samples)[None], (missing, 0))
        return self.model.audio_vae.encode(wave, rate)[0].T.contiguous().numpy()

    @torch.inference_mode()
    def decode(self, latents: np.ndarray, context: np.ndarray | None = None) -> np.ndarray:
        """Offline decode of latents [frames, feat_dim] after `context`, whose own audio is cut off; float32 [n]."""
        frames = latents if context is None else np.concatenate([context, latents])
        audio = self.model.audio_vae.decode(torch.from_numpy(frames.T.copy())[None])
        return audio[0, 0, len(frames[: len(frames) - len(latents)]) * self._frame_samples :].numpy()

    def speak(
        self,
        text: str,
        *,
        seed: int,
        control: str | None = None,
        prompt: tuple[str, Path | np.ndarray] | None = None,
        reference: Path | np.ndarray | None = None,
        cfg_value: float = 2.0,
        temperature: float = 1.0,
        timesteps: int = 10,
        min_length: int = 2,
        max_length: int | None = None,
    ) -> Spoken:
        """Speak through the package's public pipeline.

        Args:
            prompt: its words, and the recording or its latents.
            reference: a recording or its latents.
            max_length: replaces the guard on length, as in the engine.
        """
        captured: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        limits: list[int] = []
        flags: list[bool] = []
        margins: list[tuple[float, float]] = []
        model = self.model

        def inference(*args, **kwargs):
            limits.append(kwargs["max_len"])
            for result in type(model)._inference(model, *args, **kwargs):
                captured.append(result)
                yield result

        def solve_euler(x, **kwargs):
            noise = patch_noise(torch.tensor([seed]), torch.tensor([len(flags)]), self.patch_size, self.feat_dim)
            assert noise.shape == x.shape
            return type(model.feat_decoder).solve_euler(model.feat_decoder, x=noise * temperature, **kwargs)

        def build_prompt_cache(prompt_text=None, prompt_wav_path=None, reference_wav_path=None):
            cache = {}
            if reference is not None:
                cache["ref_audio_feat"] = self._features(reference, "reference")
            if prompt is not None:
                cache["prompt_text"], cache["audio_feat"] = prompt[0], self._features(prompt[1], "prompt")
            cache["mode"] = {(True, True): "ref_continuation", (True, False): "reference"}.get(
                (reference is not None, prompt is not None), "continuation"
            )
            return cache

        def on_quantize(module, inputs, output):
            levels = torch.tanh(module.in_proj(inputs[0])) * module.scale
            margins.append(((levels - levels.floor() - 0.5).abs().min().item(), float("inf")))

        def on_stop(module, inputs, output):
            flags.append(bool(output.argmax(dim=-1)[0] == 1))
            margins.append((float("inf"), (output[0, 1] - output[0, 0]).abs().item()))

        wave = {"prompt_text": prompt[0], "prompt_wav_path": __file__} if prompt is not None else {}
        hooks = [
            model.fsq_layer.register_forward_hook(on_quantize),
            model.stop_head.register_forward_hook(on_stop),
        ]
        replaced = [
            (model, "_inference", inference),
            (model, "build_prompt_cache", build_prompt_cache),
            (model.feat_decoder, "solve_euler", solve_euler),
        ]
        for owner, name, function in replaced:
            object.__setattr__(owner, name, function)
        try:
            with quiet():
                audio = self._pipeline.generate(
                    text=text if control is None else f"({control}){text}",
                    # build_prompt_cache above knows the recordings; the pipeline only checks that the files exist.
                    reference_wav_path=__file__ if reference is not None else None,
                    cfg_value=cfg_value,
                    inference_timesteps=timesteps,
                    min_len=min_length,
                    max_len=2000 if max_length is None else max_length,
                    retry_badcase=False,
                    retry_badcase_ratio_threshold=6.0 if max_length is None else 1e6,
                    **wave,
                )
        finally:
            for owner, name, _ in replaced:
                object.__delattr__(owner, name)
            for hook in hooks:
                hook.remove()
        latents = captured[0][1].reshape(-1, self.feat_dim).numpy()
        if self.first_generation:  # it returns what the decoder starts from, too
            latents = latents[-len(flags) * self.patch_size :]
        patches = len(latents) // self.patch_size
        stopped = flags[-1] and patches - 1 > min_length
        assert stopped or patches == limits[0]
        return Spoken(
            latents=latents,
            audio=audio,
            finish_reason="stop" if stopped else "length",
            quantization_margin=min(m[0] for m in margins),
            stop_margin=min(m[1] for m in margins),
        )

    def speak_clearly(self, text: str, *, seeds: Iterable[int], **fields) -> tuple[int, Spoken]:
        """The first of `seeds` with which no decision is a close one, and what is spoken with it."""
        tried = []
        for seed in seeds:
            spoken = self.speak(text, seed=seed, **fields)
            if spoken.is_clear:
                return seed, spoken
            tried.append((seed, spoken.quantization_margin, spoken.stop_margin))
        raise AssertionError(f"close decisions with every seed (seed, quantization margin, stop margin): {tried}")

    def _features(self, source: Path | np.ndarray, purpose: str) -> torch.Tensor:
        latents = source if isinstance(source, np.ndarray) else self.encode(source, purpose)
        return torch.from_numpy(latents.reshape(-1, self.patch_size, self.feat_dim))
