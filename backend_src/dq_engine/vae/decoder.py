"""The AudioVAE's decoder as a stream: each slot keeps, per causal convolution, the inputs its next output needs.

Decoding a stream's patches one after the other gives the samples that decoding them all at once would give.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import conv1d, conv_transpose1d

from dq_engine.errors import CheckpointError
from dq_engine.kernels.causal_depthwise import causal_depthwise_snake
from dq_engine.kernels.snake import snake
from dq_engine.nano import (
    AudioVAEV2,
    CausalConv1d,
    CausalDecoderBlock,
    CausalTransposeConv1d,
    NoiseBlock,
    Snake1d,
    causal_padding,
)


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha, per channel."""

    def __init__(self, layer: Snake1d) -> None:
        super().__init__()
        self.register_buffer("alpha", layer.alpha.detach())
        self.register_buffer("inverse", (layer.alpha.detach() + 1e-9).reciprocal())

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return snake(x, self.alpha, self.inverse)


class Affine(nn.Module):
    """x * scale + bias, per channel: the decoder's conditioning on its own output rate, a constant."""

    def __init__(self, scale: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale[None, :, None])
        self.register_buffer("bias", bias[None, :, None])

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, x, self.scale)


class StreamingConv(nn.Module):
    """A causal convolution; state [slots, channels, padding] holds the last inputs. Weight norm is folded."""

    def __init__(self, conv: CausalConv1d, slots: int) -> None:
        super().__init__()
        self.register_buffer("weight", conv.weight.detach().clone())
        self.register_buffer("conv_bias", None if conv.bias is None else conv.bias.detach().clone())
        self.dilation, self.groups, self.padding = conv.dilation[0], conv.groups, causal_padding(conv)
        self.register_buffer("state", self.weight.new_zeros(slots, conv.in_channels, self.padding))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if self.padding:
            x = torch.cat([self.state[slots], x], dim=-1)
            self.state[slots] = x[..., -self.padding :]
        return conv1d(x, self.weight, self.conv_bias, dilation=self.dilation, groups=self.groups)


class StreamingTransposedConv(nn.Module):
    """A causal transposed convolution; state [slots, channels, context] holds the last inputs."""

    def __init__(self, conv: CausalTransposeConv1d, slots: int) -> None:
        super().__init__()
        self.register_buffer("weight", conv.weight.detach().clone())
        self.register_buffer("conv_bias", None if conv.bias is None else conv.bias.detach().clone())
        self.stride = conv.stride[0]
        self.context = (conv.kernel_size[0] - 1) // self.stride
        self.register_buffer("state", self.weight.new_zeros(slots, conv.in_channels, self.context))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        frames = x.size(-1)
        if self.context:
            x = torch.cat([self.state[slots], x], dim=-1)
            self.state[slots] = x[..., -self.context :]
        out = conv_transpose1d(x, self.weight, self.conv_bias, stride=self.stride)
        # What the context alone gives went out with the chunk before; the tail belongs to the next.
        return out[..., self.context * self.stride :][..., : frames * self.stride]


class ResidualUnit(nn.Module):
    """x + pointwise(snake(conv(snake(x)))).

    Args:
        first, second: the snakes.
        conv: the convolution over time.
        pointwise: the one over channels.
    """

    def __init__(self, first: Snake, conv: StreamingConv, second: Snake, pointwise: StreamingConv) -> None:
        super().__init__()
        self.first, self.conv, self.second, self.pointwise = first, conv, second, pointwise
        self.fused = conv.groups == len(conv.weight) == conv.state.size(1) and conv.conv_bias is not None

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = self.first(x, slots)
        if self.fused:
            c, s = self.conv, self.second
            y = causal_depthwise_snake(y, slots, c.state, c.weight, c.conv_bias, c.dilation, s.alpha, s.inverse)
        else:
            y = self.second(self.conv(y, slots), slots)
        return x + self.pointwise(y, slots)


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class StreamingDecoder(nn.Module):
    """Latents to audio, for any subset of the slots at a time.

    Args:
        vae: the weights; copied, so the VAE itself stays as it is.
        slots: number of slots; slot numbers are below it.
    """

    def __init__(self, vae: AudioVAEV2, slots: int) -> None:
        super().__init__()
        self.samples_per_frame = vae.decoder_chunk_size
        self.layers = nn.ModuleList(_streaming_layers(vae, slots))

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Decode the next frames of some streams.

        Args:
            latents: [B, frames, feat_dim].
            slots: int64 [B], all different.

        Returns:
            [B, frames * samples_per_frame]
        """
        x = latents.transpose(1, 2)
        for layer in self.layers:
            x = layer(x, slots)
        return x[:, 0]

    @torch.inference_mode()
    def reset(self, slots: torch.Tensor) -> None:
        """Forget the past of some slots (int64 [B]): their next frames begin a stream."""
        for state in self._states():
            state[slots] = 0

    @torch.inference_mode()
    def save(self, slot: int) -> list[torch.Tensor]:
        """A copy of a slot's past, to go on in any slot later."""
        return [state[slot].clone() for state in self._states()]

    @torch.inference_mode()
    def restore(self, slot: int, past: list[torch.Tensor]) -> None:
        """Let a slot go on from a past that `save` gave."""
        for state, saved in zip(self._states(), past, strict=True):
            state[slot] = saved

    def _states(self) -> Iterator[torch.Tensor]:
        return (buffer for name, buffer in self.named_buffers() if name.endswith(".state") and buffer.numel())


def _streaming_layers(vae: AudioVAEV2, slots: int) -> list[nn.Module]:
    decoder = vae.decoder
    conditions = [None] * len(decoder.model) if decoder.sr_bin_boundaries is None else list(decoder.sr_cond_model)
    layers = []
    for layer, condition in zip(decoder.model, conditions, strict=True):
        if condition is not None:
            layers += _condition_layers(vae, condition, slots)
        layers += _convert(layer, slots)
    return layers


def _condition_layers(vae: AudioVAEV2, condition: nn.Module, slots: int) -> list[nn.Module]:
    rate = torch.tensor(vae.out_sample_rate, device=vae.decoder.sr_bin_boundaries.device)
    index = torch.bucketize(rate, vae.decoder.sr_bin_boundaries)
    if condition.cond_type in ("scale_bias", "scale_bias_init"):
        scale, bias = condition.scale_embed.weight[index], condition.bias_embed.weight[index]
    elif condition.cond_type == "add":
        bias = condition.cond_embed.weight[index]
        scale = torch.ones_like(bias)
    else:
        raise CheckpointError(f'config.json: audio_vae_config.cond_type "{condition.cond_type}" is not supported')
    return [Affine(scale.detach(), bias.detach()), *_convert(condition.out_layer, slots)]


def _convert(layer: nn.Module, slots: int) -> list[nn.Module]:
    """The streaming form of one layer of the official decoder."""
    if isinstance(layer, CausalConv1d):
        return [StreamingConv(layer, slots)]
    if isinstance(layer, CausalTransposeConv1d):
        return [StreamingTransposedConv(layer, slots)]
    if isinstance(layer, Snake1d):
        return [Snake(layer)]
    if isinstance(layer, nn.Tanh):
        return [Tanh()]
    if isinstance(layer, nn.Identity):
        return []
    if isinstance(layer, NoiseBlock):
        raise CheckpointError("config.json: audio_vae_config.use_noise_block is not supported: its audio is random")
    if isinstance(layer, CausalDecoderBlock | nn.Sequential):
        return [
            new
            for child in (layer.block if isinstance(layer, CausalDecoderBlock) else layer)
            for new in _convert(child, slots)
        ]
    return [ResidualUnit(*(new for child in layer.block for new in _convert(child, slots)))]
