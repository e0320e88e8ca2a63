"""The AudioVAE's decoder as a stream: each slot keeps, per causal convolution, the inputs its next output needs.

Decoding a stream's patches one after the other gives the samples that decoding them all at once would give. In memory
frames lie before channels: nearly all of it is matrix products then, and what stands between is part of their kernels.
"""

from dataclasses import dataclass

import torch
from torch import nn

from dq_engine.errors import CheckpointError
from dq_engine.kernels.causal_depthwise import causal_depthwise, causal_depthwise_torch
from dq_engine.kernels.causal_gemm import causal_gemm, causal_gemm_torch
from dq_engine.kernels.causal_output import causal_output, causal_output_torch
from dq_engine.kernels.snake import Activation
from dq_engine.kernels.stream_state import shift_in, shift_in_torch
from dq_engine.nano import (
    AudioVAEV2,
    CausalConv1d,
    CausalDecoderBlock,
    CausalTransposeConv1d,
    NoiseBlock,
    Snake1d,
    causal_padding,
)

_FUSED = (causal_depthwise, causal_gemm, causal_output, shift_in)
_PLAIN = (causal_depthwise_torch, causal_gemm_torch, causal_output_torch, shift_in_torch)
_ALIGNMENT = 64
"""Elements that each convolution's part of a slot's state is a multiple of."""


@dataclass
class Convolution:
    """One causal convolution, and what follows it. Weight norm is folded.

    Args:
        kind: depthwise; gemm (over all channels, transposed ones too); output (to one channel, then tanh).
        weight: [taps, C] or [taps, C, stride * D], see the kernels.
        bias: [D].
        past: input frames that it keeps.
        dilation: frames from tap to tap.
        activation: of its outputs; None for none.
        keep_raw: whether its outputs before the activation are the next residual.
        residual: whether the last ones kept so are added.
        state: [slots, past, C], a part of every slot's state.
    """

    kind: str
    weight: torch.Tensor
    bias: torch.Tensor
    past: int
    dilation: int
    activation: Activation | None = None
    keep_raw: bool = False
    residual: bool = False
    state: torch.Tensor | None = None


class StreamingDecoder:
    """Latents to audio, for any subset of the slots at a time.

    Args:
        vae: the weights; copied, so the VAE itself stays as it is.
        slots: number of slots; slot numbers are below it.
        dtype: what it runs in.
        fused: False for plain torch where there are kernels.

    Raises:
        CheckpointError: the decoder has parts that are not supported.
    """

    @torch.inference_mode()
    def __init__(self, vae: AudioVAEV2, slots: int, dtype: torch.dtype = torch.float32, fused: bool = True) -> None:
        self.dtype = dtype
        self._functions = _FUSED if fused else _PLAIN
        self._layers = _Builder(vae, dtype).layers
        sizes = [layer.past * layer.weight.size(1) for layer in self._layers]
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._state = self._layers[0].weight.new_zeros(slots, total)
        for layer, size, offset in zip(self._layers, sizes, offsets, strict=True):
            layer.state = self._state[:, offset : offset + size].view(slots, layer.past, layer.weight.size(1))

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Decode the next frames of some streams.

        Args:
            latents: [B, frames, feat_dim], of the decoder's dtype.
            slots: int64 [B], all different.

        Returns:
            float32 [B, frames * vae.decoder_chunk_size]
        """
        depthwise, gemm, output, shift_in = self._functions
        x, kept = latents.contiguous(), None
        for layer in self._layers:
            before, (weight, bias) = x, (layer.weight, layer.bias)
            if layer.kind == "depthwise":
                x = depthwise(x, slots, layer.state, weight, bias, layer.dilation, layer.activation)
            elif layer.kind == "gemm":
                residual = kept if layer.residual else None
                raw, x = gemm(
                    x, slots, layer.state, weight, bias, layer.dilation, residual, layer.activation, layer.keep_raw
                )
                kept = raw if layer.keep_raw else kept
            else:
                x = output(x, slots, layer.state, weight, bias)
            if layer.past:
                shift_in(before, slots, layer.state)
        return x

    @torch.inference_mode()
    def reset(self, slots: torch.Tensor) -> None:
        """Forget the past of some slots (int64 [B]): their next frames begin a stream."""
        self._state.index_fill_(0, slots, 0)

    @torch.inference_mode()
    def save(self, slot: int) -> torch.Tensor:
        """A copy of a slot's past, to go on in any slot later."""
        return self._state[slot].clone()

    @torch.inference_mode()
    def restore(self, slot: int, past: torch.Tensor) -> None:
        """Let a slot go on from a past that `save` gave."""
        self._state[slot] = past


class _Builder:
    """Walks the official decoder's layers and notes what each convolution is followed by."""

    def __init__(self, vae: AudioVAEV2, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._affine: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
        self.layers: list[Convolution] = []
        decoder = vae.decoder
        conditioned = decoder.sr_bin_boundaries is not None
        conditions = list(decoder.sr_cond_model) if conditioned else [None] * len(decoder.model)
        for layer, condition in zip(decoder.model, conditions, strict=True):
            if condition is not None:
                self._add_condition(vae, condition)
            self._add(layer)
        if self.layers[-1].kind != "output":
            raise CheckpointError("config.json: the AudioVAE's decoder does not end in one channel and a tanh")

    def _add(self, layer: nn.Module) -> None:
        if isinstance(layer, CausalConv1d):
            self._add_convolution(layer)
        elif isinstance(layer, CausalTransposeConv1d):
            self._add_transposed(layer)
        elif isinstance(layer, Snake1d):
            alpha = layer.alpha.detach().flatten().float()
            self.layers[-1].activation = Activation(*self._affine, alpha, (alpha + 1e-9).reciprocal())
            self._affine = (None, None)
        elif isinstance(layer, nn.Tanh):
            last = self.layers[-1]
            if last.weight.shape[2:] != (1,) or last.dilation != 1:
                raise CheckpointError("config.json: an AudioVAE decoder of more than one output channel")
            last.kind, last.weight = "output", last.weight[:, :, 0].contiguous()
        elif isinstance(layer, NoiseBlock):
            raise CheckpointError("config.json: audio_vae_config.use_noise_block is not supported: its audio is random")
        elif isinstance(layer, CausalDecoderBlock | nn.Sequential):
            for child in layer.block if isinstance(layer, CausalDecoderBlock) else layer:
                self._add(child)
        elif not isinstance(layer, nn.Identity):  # a residual unit
            self.layers[-1].keep_raw = True
            self._add(layer.block)
            self.layers[-1].residual = True

    def _add_convolution(self, conv: CausalConv1d) -> None:
        weight = conv.weight.detach()  # [D, C / groups, taps]
        past = causal_padding(conv)
        if past != (weight.size(2) - 1) * conv.dilation[0]:
            raise CheckpointError("config.json: an AudioVAE decoder whose convolutions are not causal is not supported")
        if conv.groups == 1:
            self._append("gemm", weight.permute(2, 1, 0), conv, past, conv.dilation[0])
        elif conv.groups == conv.in_channels == conv.out_channels:
            self._append("depthwise", weight[:, 0].t(), conv, past, conv.dilation[0])
        else:
            raise CheckpointError(f"config.json: an AudioVAE decoder with {conv.groups} groups is not supported")

    def _add_transposed(self, conv: CausalTransposeConv1d) -> None:
        weight, stride = conv.weight.detach(), conv.stride[0]  # [C, D, taps]
        if weight.size(2) != 2 * stride:
            raise CheckpointError("config.json: an AudioVAE decoder that does not upsample by half its kernel")
        # The frame before gives what its second half spills into this one.
        halves = [weight[:, :, stride:], weight[:, :, :stride]]
        packed = torch.stack([half.transpose(1, 2).flatten(1) for half in halves])
        self._append("gemm", packed, conv, 1, 1)

    def _append(self, kind: str, weight: torch.Tensor, conv: nn.Module, past: int, dilation: int) -> None:
        bias = weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()
        weight, bias = weight.to(self._dtype).contiguous(), bias.to(self._dtype).clone()
        self.layers.append(Convolution(kind, weight, bias, past, dilation))

    def _add_condition(self, vae: AudioVAEV2, condition: nn.Module) -> None:
        """The decoder's conditioning on its own output rate: a constant scale and offset per channel."""
        rate = torch.tensor(vae.out_sample_rate, device=vae.decoder.sr_bin_boundaries.device)
        index = torch.bucketize(rate, vae.decoder.sr_bin_boundaries)
        if condition.cond_type in ("scale_bias", "scale_bias_init"):
            scale, offset = condition.scale_embed.weight[index], condition.bias_embed.weight[index]
        elif condition.cond_type == "add":
            offset = condition.cond_embed.weight[index]
            scale = torch.ones_like(offset)
        else:
            raise CheckpointError(f'config.json: audio_vae_config.cond_type "{condition.cond_type}" is not supported')
        self._affine = (scale.detach().float(), offset.detach().float())
        self._add(condition.out_layer)
