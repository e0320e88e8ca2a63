"""From settings and a checkpoint's directory to the parts of an engine, sized for the device."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.config import EngineConfig
from dq_engine.engine_graphs import Graphs
from dq_engine.lora.layers import LoraSettings
from dq_engine.model.checkpoint import Checkpoint, load_checkpoint
from dq_engine.parallel.group import Rank, agree_on_least
from dq_engine.runner import Runner
from dq_engine.vae.decoder import StreamingDecoder
from dq_engine.vae.encoder import VaeEncoder
from dq_engine.vae.stage import VaeStage

# Left free on a GPU for steps that no graph holds and for encoding a minute of audio.
_GPU_SCRATCH_BYTES = 3 * 2**30
_DEFAULT_MAX_MODEL_LEN = 4096


@dataclass
class Limits:
    """Sizes and times that the settings left to the device and the checkpoint."""

    max_num_seqs: int
    max_model_len: int
    num_kv_blocks: int
    kv_tokens: int
    queue_timeout_s: float
    step_timeout_s: float


@dataclass
class Parts:
    """What an engine is made of."""

    checkpoint: Checkpoint
    limits: Limits
    runner: Runner
    vae: VaeStage
    encoder: VaeEncoder
    step_seconds: dict[int, float]
    """How long a step without prompts takes, by its number of streams, where that could be measured already."""
    prefill_seconds: list[tuple[int, float]]
    """How long prompts of so many tokens take, likewise."""


def load(
    config: EngineConfig,
    path: Path,
    progress: Callable[[str, float], None],
    rank: Rank | None = None,
    runner_kind: type[Runner] = Runner,
) -> Parts:
    """Load the checkpoint onto the device and allocate what the streams will need.

    Args:
        rank: of this process, where several share one engine; waits for the others.
        runner_kind: what runs the steps.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ValueError: the settings do not go together, or do not fit the device.
    """
    device = _device(config.device)
    try:
        return _load(config, path, device, progress, rank, runner_kind)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(
            "the GPU's memory does not hold the model, what its streams need and the CUDA graphs: "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB were free in the end; lower max_num_seqs, "
            "max_num_batched_tokens, gpu_memory_utilization, lora_max_loras or num_kvcache_blocks (as far as they are "
            "set), or end what else is on the GPU"
        ) from error


def _load(
    config: EngineConfig,
    path: Path,
    device: torch.device,
    progress: Callable[[str, float], None],
    rank: Rank | None,
    runner_kind: type[Runner],
) -> Parts:
    on_gpu = device.type == "cuda"
    dtype = {"auto": torch.bfloat16 if on_gpu else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
    if not on_gpu:
        # Threads that wait for a core spin: the server and its clients need cores too.
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // 2))
    elif dtype == torch.float32:  # who asks for float32 does not mean TF32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    max_num_seqs = config.max_num_seqs or (512 if on_gpu else 16)
    if config.max_num_batched_tokens <= max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) must exceed max_num_seqs ({max_num_seqs}): "
            "every running stream takes one token of a step"
        )
    lora = _lora_settings(config)
    if rank is not None:
        rank.join(device)
    checkpoint = load_checkpoint(path, device, dtype, config.inference_timesteps, progress, lora)
    if checkpoint.lora is not None:
        progress("compiling the kernels of adapters", 0.0)
        checkpoint.lora.compile_kernels()
    max_model_len = _max_model_len(config, checkpoint)
    runner = runner_kind(checkpoint, config.attention, config.inference_timesteps, max_num_seqs, max_model_len)
    # Half precision is 55 dB from float32 in the AudioVAE (tests/gpu); who asks for float32 gets it throughout.
    vae_dtype = torch.float16 if on_gpu and dtype != torch.float32 else torch.float32
    decoder = StreamingDecoder(checkpoint.vae, max_num_seqs + 1, vae_dtype, config.vae_compile)
    vae = VaeStage(decoder, device, config.gpu_latents)
    graphs = Graphs(runner, vae, config, max_num_seqs) if on_gpu and not config.enforce_eager else None
    num_blocks = config.num_kvcache_blocks
    if not num_blocks:
        graph_bytes = 0 if graphs is None else graphs.probe(progress)
        num_blocks = _num_kv_blocks(config, runner, max_num_seqs, max_model_len, graph_bytes)
    num_blocks = int(agree_on_least(num_blocks, device))
    runner.allocate_kv_cache(num_blocks)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        kv_tokens=num_blocks * BLOCK_SIZE,
        queue_timeout_s=config.queue_timeout_s or (10.0 if on_gpu else 120.0),
        step_timeout_s=config.step_timeout_s or (30.0 if on_gpu else 600.0),
    )
    step_seconds, prefill_seconds = ({}, []) if graphs is None else graphs.capture(progress)
    encoder = VaeEncoder(checkpoint.vae, checkpoint.model.patch_size)
    return Parts(checkpoint, limits, runner, vae, encoder, step_seconds, prefill_seconds)


def _device(setting: str) -> torch.device:
    available = torch.cuda.is_available()
    if setting == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")
    if setting.startswith("auto:"):
        setting = setting.replace("auto", "cuda") if available else "cpu"
    device = torch.device(setting)
    if device.type == "cuda":
        if not available:
            raise ValueError(f"device is {setting}, but torch sees no CUDA device")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device is {setting}, but there are {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(device)
    return device


def _lora_settings(config: EngineConfig) -> LoraSettings | None:
    if not config.lora_max_loras:
        return None
    if config.lora_dir is None:
        raise ValueError(f"lora_max_loras is {config.lora_max_loras}, but lora_dir is not set")
    lm, dit, between = (
        [] if names == "none" else names.split(",")
        for names in (config.lora_target_modules_lm, config.lora_target_modules_dit, config.lora_target_proj_modules)
    )
    return LoraSettings(config.lora_max_loras, config.lora_max_rank, lm, dit, between)


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    trained = min(checkpoint.config.max_length, checkpoint.config.lm_config.max_position_embeddings)
    if config.max_model_len is None:
        return min(_DEFAULT_MAX_MODEL_LEN, trained)
    if config.max_model_len > trained:
        raise ValueError(f"max_model_len ({config.max_model_len}) exceeds the checkpoint's max_length ({trained})")
    return config.max_model_len


def _num_kv_blocks(
    config: EngineConfig, runner: Runner, max_num_seqs: int, max_model_len: int, graph_bytes: int
) -> int:
    """Blocks for all slots at full length, or as many as the GPU's memory holds beside the graphs."""
    per_stream = -(-max_model_len // BLOCK_SIZE)
    wanted = max_num_seqs * per_stream
    if runner.device.type != "cuda":
        return wanted
    free, total = torch.cuda.mem_get_info(runner.device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - graph_bytes - _GPU_SCRATCH_BYTES
    fitting = budget // runner.attention.bytes_per_block
    if fitting < per_stream:
        raise ValueError(
            f"the GPU's memory does not hold the KV cache of one stream: {free / 2**30:.1f} of {total / 2**30:.1f} GiB "
            f"are free, CUDA graphs need {graph_bytes / 2**30:.1f} GiB and other scratch memory "
            f"{_GPU_SCRATCH_BYTES / 2**30:.1f} GiB; raise gpu_memory_utilization, or lower max_num_seqs, "
            "max_num_batched_tokens, max_model_len or lora_max_loras"
        )
    return min(wanted, fitting)
