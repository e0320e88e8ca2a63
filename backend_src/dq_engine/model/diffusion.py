"""LocDiT: one patch of latents out of noise, by Euler steps with classifier-free guidance (CFG-Zero*).

The schedule and the update are those of the official `UnifiedCFM.solve_euler`. What does not change between the
evaluations of a patch (the projections of the condition), or ever (the embeddings of the times), is computed once.
"""

import torch

from dq_engine.model.transformer import LocalTransformer
from dq_engine.nano import VoxCPM2LocDiT


class Diffusion:
    """The Euler solver over one LocDiT.

    Args:
        estimator: the LocDiT.
        timesteps: number of Euler steps; the first 4% of the schedule, at least one step, are zero (CFG-Zero*).
        mean_mode: condition on the step's length also.
    """

    def __init__(self, estimator: VoxCPM2LocDiT, timesteps: int, mean_mode: bool) -> None:
        self.estimator = estimator
        self.decoder = LocalTransformer(estimator.decoder)
        weight = estimator.in_proj.weight
        self.steps = self._schedule(timesteps, mean_mode, weight.device, weight.dtype)

    @torch.inference_mode()
    def _schedule(
        self, timesteps: int, mean_mode: bool, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The evaluations of a patch, each as (step length, embedding of its time [1, 1, hidden])."""
        span = torch.linspace(1, 0, timesteps + 1, device=device, dtype=dtype)
        span = span + (torch.cos(torch.pi / 2 * span) - 1 + span)
        zero_steps = max(1, int(len(span) * 0.04))
        t, dt = span[0], span[0] - span[1]
        e = self.estimator
        steps = []
        for index in range(1, timesteps + 1):
            if index > zero_steps:
                length = dt if mean_mode else torch.zeros_like(dt)
                embedding = e.time_mlp(e.time_embeddings(t[None]).to(dtype))
                embedding = embedding + e.delta_time_mlp(e.time_embeddings(length[None]).to(dtype))
                steps.append((dt, embedding[:, None]))
            t = t - dt
            if index < timesteps:
                dt = t - span[index + 1]
        return steps

    def forward(
        self, noise: torch.Tensor, mu: torch.Tensor, condition: torch.Tensor, cfg_value: torch.Tensor
    ) -> torch.Tensor:
        """Generate one patch for each of R streams.

        Args:
            noise: [R, patch_size, feat_dim], already scaled by the temperature.
            mu: [R, 2 * hidden], two tokens of the condition; [R, hidden] in VoxCPM 0.5B and 1.5, which add it to the
                token of the time.
            condition: [R, patch_size, feat_dim], the patch before (zeros where there is none).
            cfg_value: [R].

        Returns:
            [R, patch_size, feat_dim]
        """
        e = self.estimator
        rows, patch_size, _ = noise.shape
        mu = mu.view(rows, -1, e.in_proj.out_features)
        mu = torch.cat([mu, torch.zeros_like(mu)])
        condition = e.cond_proj(condition).repeat(2, 1, 1)
        guidance = cfg_value[:, None, None]
        x = noise
        for dt, time in self.steps:
            first = [mu + time] if mu.size(1) == 1 else [mu, time.expand(2 * rows, -1, -1)]
            tokens = torch.cat([*first, condition, e.in_proj(x).repeat(2, 1, 1)], dim=1)
            hidden = self.decoder.forward(tokens)
            positive, negative = e.out_proj(hidden[:, -patch_size:]).chunk(2)
            negative = negative * _projection(positive, negative)
            x = x - dt * (negative + guidance * (positive - negative))
        return x


def _projection(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """The scale that brings `negative` closest to `positive`, [R, 1, 1] (CFG-Zero*, Fan et al., 2025)."""
    dot = (positive * negative).sum(dim=(1, 2), keepdim=True)
    return dot / (negative.square().sum(dim=(1, 2), keepdim=True) + 1e-8)
