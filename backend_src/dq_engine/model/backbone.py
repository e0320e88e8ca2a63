"""From tokens and patches to what LocDiT is conditioned on: LocEnc, base LM, quantization, residual LM."""

from dataclasses import dataclass

import torch

from dq_engine.attention.paged import PagedAttention
from dq_engine.model.transformer import LocalTransformer, PagedTransformer
from dq_engine.nano import VoxCPM2Model


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
    """LocEnc and the two language models of VoxCPM2, on the modules of nano-vllm-voxcpm.

    Args:
        model: the weights.
        attention: the `attention` setting.
    """

    def __init__(self, model: VoxCPM2Model, attention: str) -> None:
        self.model = model
        lms = [model.base_lm, model.residual_lm]
        self.attention = PagedAttention([layer.self_attn for lm in lms for layer in lm.layers], attention)
        self.base_lm = PagedTransformer(lms[0], self.attention, 0)
        self.residual_lm = PagedTransformer(lms[1], self.attention, len(lms[0].layers))
        self.encoder = LocalTransformer(model.feat_encoder.encoder)

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """LocEnc: [A, patch_size, feat_dim] to the language models' input, [A, hidden]."""
        m = self.model.feat_encoder
        special = m.special_token[0].expand(len(patches), -1, -1)
        encoded = self.encoder.forward(torch.cat([special, m.in_proj(patches)], dim=1))
        return self.model.enc_to_lm_proj(encoded[:, 0])

    def forward(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass; `attention.metadata` must have been set.

        Returns:
            mu: [R, 2 * dit_hidden], LocDiT's conditioning for the patch after each sampled token.
            stop: bool [R], whether the model would stop after that patch.
        """
        m = self.model
        if batch.token_ids is None:
            embeds = patch_embeds = self.encode(batch.patches)
            hidden = m.fsq_layer(self.base_lm.forward(embeds, batch.positions))
        else:
            embeds = m.base_lm.embed_tokens(batch.token_ids)
            patch_embeds = torch.zeros_like(embeds)
            if batch.patches.size(0):
                encoded = self.encode(batch.patches)
                embeds = embeds.index_copy(0, batch.patch_rows, encoded)
                patch_embeds = patch_embeds.index_copy(0, batch.patch_rows, encoded)
            hidden = self.base_lm.forward(embeds, batch.positions)
            if batch.patches.size(0):
                hidden = hidden.index_copy(0, batch.patch_rows, m.fsq_layer(hidden[batch.patch_rows]))
        fused = m.fusion_concat_proj(torch.cat([hidden, patch_embeds], dim=-1))
        residual = self.residual_lm.forward(fused, batch.positions)
        if batch.sample_rows is not None:
            hidden, residual = hidden[batch.sample_rows], residual[batch.sample_rows]
        mu = torch.cat([m.lm_to_dit_proj(hidden), m.res_to_dit_proj(residual)], dim=-1)
        stop = m.stop_head(m.stop_actn(m.stop_proj(hidden))).argmax(dim=-1) == 1
        return mu, stop
