"""Room for LoRA adapters, in nano-vllm-voxcpm's words."""

from dataclasses import dataclass, field


def _attention() -> list[str]:
    return ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass
class LoRAConfig:
    """How many adapters may be in use at once, and how large they may be.

    Args:
        max_loras: adapters in use at once.
        max_lora_rank: the largest rank of one.
        enable_lm, enable_dit, enable_proj, target_modules_lm, target_modules_dit, target_proj_modules: taken for the
            sake of programs that give them. This engine applies an adapter to all that it holds weights for.
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

    def settings(self) -> dict[str, int]:
        """As settings of the engine."""
        return {"lora_max_loras": self.max_loras, "lora_max_rank": self.max_lora_rank}
