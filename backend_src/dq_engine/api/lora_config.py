"""Room for LoRA adapters, in nano-vllm-voxcpm's words."""

from dataclasses import dataclass, field


def _attention() -> list[str]:
    return ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass
class LoRAConfig:
    """How many adapters may be in use at once, and how large they may be.

    Args:
        enable_lm, enable_dit, enable_proj: whether they may change the language models, LocDiT, what lies between them.
        max_loras: adapters on the device at once.
        max_lora_rank: the largest rank of one.
        target_modules_lm, target_modules_dit: the projections of their layers that may be changed.
        target_proj_modules: the projections between the models that may be changed.
    """

    enable_lm: bool = True
    enable_dit: bool = True
    enable_proj: bool = False
    max_loras: int = 1
    max_lora_rank: int = 32
    target_modules_lm: list[str] = field(default_factory=_attention)
    target_modules_dit: list[str] = field(default_factory=_attention)
    target_proj_modules: list[str] = field(
        default_factory=lambda: ["enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj"]
    )

    def settings(self) -> dict[str, object]:
        """As settings of the engine."""
        return {
            "lora_max_loras": self.max_loras,
            "lora_max_rank": self.max_lora_rank,
            "lora_dir": "/",  # whoever calls from Python may read what this process may
            "lora_target_modules_lm": ",".join(self.target_modules_lm if self.enable_lm else ()) or "none",
            "lora_target_modules_dit": ",".join(self.target_modules_dit if self.enable_dit else ()) or "none",
            "lora_target_proj_modules": ",".join(self.target_proj_modules if self.enable_proj else ()) or "none",
        }
