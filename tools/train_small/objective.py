"""The official losses: flow matching of each patch, and the decision to stop."""

import torch
from torch.nn.functional import cross_entropy

from train_small.trainer import Batch

_HISTORY_NOISE = 0.25
"""Most noise on the latents that are read, whose variance is 1: when speaking, the history is not perfect."""
_UNCONDITIONAL_SHARE = 0.1
_STOP_WEIGHT = 0.5


def read(model, batch: Batch, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the language models know before each patch. LocEnc and LocDiT run on the positions of audio only.

    Args:
        model: the official VoxCPM2Model.
        latents: [B, R + A, 4, 64], those of a reference first.

    Returns:
        The base model's hidden states [B, A, H], and LocDiT's condition [B, A, 2 D].
    """
    rows, positions = batch["tokens"].shape
    embedded = model.enc_to_lm_proj(model.feat_encoder(latents)).float() * batch["audio_mask"][..., None]
    width = embedded.shape[-1]
    at = batch["audio_at"]
    audio = torch.zeros(rows, positions, width, device=at.device)
    audio = audio.scatter_add(1, at[..., None].expand(-1, -1, width), embedded)
    audio_mask = torch.zeros(rows, positions, device=at.device).scatter_add(1, at, batch["audio_mask"])[..., None]
    text_mask = batch["text_mask"][..., None]
    text = model.base_lm.embed_tokens(batch["tokens"]) * text_mask
    hidden, _ = model.base_lm(inputs_embeds=text + audio, is_causal=True)
    hidden = model.fsq_layer(hidden) * audio_mask + hidden * text_mask
    residual, _ = model.residual_lm(
        inputs_embeds=model.fusion_concat_proj(torch.cat([hidden, audio], -1)), is_causal=True
    )
    before = (at[:, -batch["learned"].shape[1] :] - 1).clamp(min=0)[..., None].expand(-1, -1, width)
    hidden, residual = hidden.gather(1, before), residual.gather(1, before)
    return hidden, torch.cat([model.lm_to_dit_proj(hidden), model.res_to_dit_proj(residual)], -1)


def losses(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, and its parts: of the flow, of the stops."""
    rows, patches = batch["stops"].shape
    count, device = rows * patches, batch["stops"].device
    amount = _HISTORY_NOISE * torch.rand(rows, 1, 1, 1, device=device)
    history = batch["latents"] + amount * torch.randn_like(batch["latents"])
    hidden, condition = read(model, batch, history)
    # LocDiT sees the patch before; before the first there is none.
    own = history[:, -patches:]
    previous = torch.cat([torch.zeros_like(own[:, :1]), own[:, :-1]], 1).flatten(0, 1).transpose(1, 2)
    target = batch["latents"][:, -patches:].flatten(0, 1).transpose(1, 2)
    kept = torch.rand(count, 1, device=device) > _UNCONDITIONAL_SHARE
    time = torch.sigmoid(torch.randn(count, device=device) - 0.4)
    noise, t = torch.randn_like(target), time[:, None, None]
    velocity = model.feat_decoder.estimator(
        (1 - t) * target + t * noise, condition.flatten(0, 1) * kept, time, previous, dt=torch.zeros_like(time)
    )
    learned = batch["learned"].flatten()
    flow = ((velocity.float() - (noise - target)).square().mean((1, 2)) * learned).sum() / learned.sum()
    logits = model.stop_head(model.stop_actn(model.stop_proj(hidden))).float()
    stop = cross_entropy(logits.transpose(1, 2), batch["stops"], reduction="none")
    stop = (stop * batch["learned"]).sum() / batch["learned"].sum()
    return flow + _STOP_WEIGHT * stop, flow, stop


def embed_times_in_both_precisions(model) -> None:
    """Half of the time embeddings as inference in float32 sees them, half as inference in bfloat16 does."""
    embeddings = model.feat_decoder.estimator.time_embeddings
    official = type(embeddings).forward

    def forward(x, scale=1000):
        exact, rounded = official(embeddings, x.float(), scale), official(embeddings, x.bfloat16(), scale).float()
        return torch.where((torch.arange(len(x), device=x.device) % 2 == 0)[:, None], exact, rounded)

    embeddings.forward = forward
