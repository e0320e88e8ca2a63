"""From tokens and patches to what LocDiT is conditioned on: LocEnc, base LM, quantization, residual LM."""

from dataclasses import dataclass

import torch
from torch import nn

from dq_engine.nano import VoxCPM2Model


class SiluAndMul(nn.Module):
    """silu(gate) * up on a [..., 2 * width] tensor; replaces nano-vllm-voxcpm's, which insists on torch.compile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


@dataclass
class TokenBatch:
    """The tokens of one pass, those of all its streams one after the other (N tokens, A of them patches).

    Args:
        positions: int64 [N], each token's place in its stream.
        patches: [A, patch_size, feat_dim] latents in the model's dtype.
        token_ids: int64 [N]; 0 where a token is a patch. None when every token is a patch (then A = N).
        patch_rows: int64 [A], which tokens are patches. None when all are.
        sample_rows: int64 [R], the tokens after which a patch is to be generated. None when all are.
    """

    positions: torch.Tensor
    patches: torch.Tensor
    token_ids: torch.Tensor | None = None
    patch_rows: torch.Tensor | None = None
    sample_rows: torch.Tensor | None = None


class Backbone:
    """The two language models of VoxCPM2, on the modules of nano-vllm-voxcpm."""

    def __init__(self, model: VoxCPM2Model) -> None:
        self.model = model

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass; the attention layers' metadata must have been set.

        Returns:
            mu: [R, 2 * dit_hidden], LocDiT's conditioning for the patch after each sampled token.
            stop: bool [R], whether the model would stop after that patch.
        """
        m = self.model
        if batch.token_ids is None:
            embeds = patch_embeds = m.enc_to_lm_proj(m.feat_encoder(batch.patches))
            hidden = m.fsq_layer(m.base_lm(embeds, batch.positions))
        else:
            embeds = m.base_lm.embed_tokens(batch.token_ids)
            patch_embeds = torch.zeros_like(embeds)
            if batch.patches.size(0):
                encoded = m.enc_to_lm_proj(m.feat_encoder(batch.patches))
                embeds = embeds.index_copy(0, batch.patch_rows, encoded)
                patch_embeds = patch_embeds.index_copy(0, batch.patch_rows, encoded)
            hidden = m.base_lm(embeds, batch.positions)
            if batch.patches.size(0):
                hidden = hidden.index_copy(0, batch.patch_rows, m.fsq_layer(hidden[batch.patch_rows]))
        residual = m.residual_lm(m.fusion_concat_proj(torch.cat([hidden, patch_embeds], dim=-1)), batch.positions)
        if batch.sample_rows is not None:
            hidden, residual = hidden[batch.sample_rows], residual[batch.sample_rows]
        mu = torch.cat([m.lm_to_dit_proj(hidden), m.res_to_dit_proj(residual)], dim=-1)
        stop = m.stop_head(m.stop_actn(m.stop_proj(hidden))).argmax(dim=-1) == 1
        return mu, stop
