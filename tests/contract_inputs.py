"""Fields of the contract as tritonclient's inputs."""

import numpy as np
import tritonclient.grpc as grpcclient

TYPES = {
    "seed": ("INT64", np.int64),
    "sample_rate": ("INT32", np.int32),
    "min_generate_length": ("INT32", np.int32),
    "max_generate_length": ("INT32", np.int32),
    "cfg_value": ("FP32", np.float32),
    "temperature": ("FP32", np.float32),
    "prompt_latents": ("FP32", np.float32),
    "reference_latents": ("FP32", np.float32),
    "stream": ("BOOL", np.bool_),
    "return_latents": ("BOOL", np.bool_),
}
"""Of those that are no STRING; its own table, so that the product's is tested against it."""


def inputs(fields: dict, client=grpcclient) -> list:
    """Inputs of a client: tritonclient.grpc, its aio, or tritonclient.http."""
    tensors = []
    for name, value in fields.items():
        kind, dtype = TYPES.get(name, ("BYTES", np.object_))
        value = value.encode() if isinstance(value, str) else value
        array = value if isinstance(value, np.ndarray) else np.array([value], dtype)
        tensors.append(client.InferInput(name, list(array.shape), kind))
        tensors[-1].set_data_from_numpy(array)
    return tensors
