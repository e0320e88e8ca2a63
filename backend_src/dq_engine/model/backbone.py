"""From tokens and patches to what LocDiT is conditioned on: LocEnc, base LM, quantization, residual LM."""

from dataclasses import dataclass

import torch

from dq_engine.attention.paged import PagedAttention
from dq_engine.model.transformer import LocalTransformer, PagedTransformer
from dq_engine.nano import VoxCPM2Model


@dataclass
class PromptTokens:
    """Tokens of prompts, those of all streams one after the other (N tokens, A patches among all of a step).

    Args:
        token_ids: int64 [N]; any id where a token is a patch.
        positions: int64 [N], each token's place in its stream.
        encoded: [1 + A, hidden], LocEnc's outputs for the patches, behind a row of zeros.
        patch_index: int64 [N], the row of `encoded` of a token that is a patch; 0 for the others.
        sample_rows: int64 [R], the tokens after which a patch may be generated.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    encoded: torch.Tensor
    patch_index: torch.Tensor
    sample_rows: torch.Tensor


class Backbone:
    """LocEnc and the two language models of VoxCPM2, on the modules of nano-vllm-voxcpm.

    Args:
        model: the weights. Without `fusion_concat_proj`, as in VoxCPM 0.5B and 1.5, what it would join is added.
        attention: the `attention` setting.
    """

    def __init__(self, model: VoxCPM2Model, attention: str) -> None:
        self.model = model
        lms = [model.base_lm, model.residual_lm]
        self.attention = PagedAttention([layer.self_attn for lm in lms for layer in lm.layers], attention)
        self.base_lm = PagedTransformer(lms[0], self.attention, 0)
        self.residual_lm = PagedTransformer(lms[1], self.attention, len(lms[0].layers))
        self.encoder = LocalTransformer(model.feat_encoder.encoder)
        self.hidden_size: int = model.enc_to_lm_proj.weight.size(0)
        self.mu_size: int = (1 if model.fusion_concat_proj is None else 2) * model.lm_to_dit_proj.weight.size(0)

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """LocEnc: [A, patch_size, feat_dim] to the language models' input, [A, hidden]."""
        m = self.model.feat_encoder
        special = m.special_token[0].expand(len(patches), -1, -1)
        encoded = self.encoder.forward(torch.cat([special, m.in_proj(patches)], dim=1))
        return self.model.enc_to_lm_proj(encoded[:, 0])

    def prefill(self, tokens: PromptTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens of prompts in; `attention.metadata` must have been set.

        Returns:
            mu: [R, mu_size], LocDiT's conditioning for the patch after each sampled token.
            stop: bool [R], whether the model would stop after that patch.
        """
        m = self.model
        is_patch = (tokens.patch_index > 0)[:, None]
        patch_embeds = tokens.encoded[tokens.patch_index]
        embeds = torch.where(is_patch, patch_embeds, m.base_lm.embed_tokens(tokens.token_ids))
        hidden = self.base_lm.forward(embeds, tokens.positions)
        hidden = torch.where(is_patch, m.fsq_layer(hidden), hidden)
        residual = self._residual(hidden, patch_embeds, tokens.positions)
        return self._heads(hidden[tokens.sample_rows], residual[tokens.sample_rows])

    def decode(self, patches: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed R streams a patch each, [R, patch_size, feat_dim] at int64 [R]; returns as `prefill`."""
        embeds = self.encode(patches)
        hidden = self.model.fsq_layer(self.base_lm.forward(embeds, positions))
        return self._heads(hidden, self._residual(hidden, embeds, positions))

    def _residual(self, hidden: torch.Tensor, patch_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.model.fusion_concat_proj is None:
            fused = hidden + patch_embeds
        else:
            fused = self.model.fusion_concat_proj(torch.cat([hidden, patch_embeds], dim=-1))
        return self.residual_lm.forward(fused, positions)

    def _heads(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.model
        mu = [m.lm_to_dit_proj(hidden), m.res_to_dit_proj(residual)]
        mu = mu[0] + mu[1] if m.fusion_concat_proj is None else torch.cat(mu, dim=-1)
        return mu, m.stop_head(m.stop_actn(m.stop_proj(hidden))).argmax(dim=-1) == 1
