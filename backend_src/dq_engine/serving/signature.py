"""The tensors of the model voxcpm2, as Triton names their types. They are public: clients depend on them."""

from dataclasses import dataclass

import numpy as np

DTYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_FP32": np.float32,
    "TYPE_INT64": np.int64,
    "TYPE_INT32": np.int32,
    "TYPE_BOOL": np.bool_,
}


@dataclass(frozen=True)
class Tensor:
    """Args: data_type: one of DTYPES. dims: the shape, -1 where it varies."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)


LATENTS = (-1, 64)
INPUTS = (
    Tensor("text", "TYPE_STRING"),
    Tensor("control", "TYPE_STRING"),
    Tensor("prompt_audio", "TYPE_STRING"),
    Tensor("prompt_text", "TYPE_STRING"),
    Tensor("prompt_latents", "TYPE_FP32", LATENTS),
    Tensor("reference_audio", "TYPE_STRING"),
    Tensor("reference_latents", "TYPE_FP32", LATENTS),
    Tensor("voice", "TYPE_STRING"),
    Tensor("lora", "TYPE_STRING"),
    Tensor("cfg_value", "TYPE_FP32"),
    Tensor("temperature", "TYPE_FP32"),
    Tensor("seed", "TYPE_INT64"),
    Tensor("min_generate_length", "TYPE_INT32"),
    Tensor("max_generate_length", "TYPE_INT32"),
    Tensor("output_format", "TYPE_STRING"),
    Tensor("sample_rate", "TYPE_INT32"),
    Tensor("stream", "TYPE_BOOL"),
    Tensor("return_latents", "TYPE_BOOL"),
)
"""All are optional but `text`."""
OUTPUTS = (
    Tensor("audio", "TYPE_FP32", (-1,)),
    Tensor("audio_bytes", "TYPE_STRING"),
    Tensor("sample_rate", "TYPE_INT32"),
    Tensor("latents", "TYPE_FP32", LATENTS),
    Tensor("finish_reason", "TYPE_STRING"),
    Tensor("stats", "TYPE_STRING"),
)
