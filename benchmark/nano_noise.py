"""nano-vllm-voxcpm with dq_engine's noise, in the process of each of its GPUs, so that both make the same patches."""

import torch
from nanovllm_voxcpm.models.voxcpm2.runner import VoxCPM2Runner


class SameNoiseRunner(VoxCPM2Runner):
    """Every request of a step must have a seed."""

    def run(self, tasks, is_prefill):
        self._rows = [(task.custom_payload.seed, task.custom_payload.seed_step) for task in tasks]
        return super().run(tasks, is_prefill)

    def run_model(self, inputs, is_prefill):
        from dq_engine.noise import patch_noise  # after the model is made: dq_engine changes nano-vllm-voxcpm

        seeds, steps = torch.tensor(self._rows, device="cuda").unbind(1)
        inputs["z_noise"] = patch_noise(seeds, steps, self.patch_size, self.feat_dim).to(self.dtype)
        return super().run_model(inputs, is_prefill)
