"""Every setting of the engine, typed. `DQ_ENGINE_<NAME>` in the environment wins over the model's config.pbtxt."""

import difflib
import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict

from dq_engine.errors import CheckpointError
from dq_engine.prefill_buckets import parse_buckets

logger = logging.getLogger(__name__)

_DEVICE = r"(auto(:\d+)?|cpu|cuda(:\d+)?)"
_UPSTREAM_BLOCKS = "NANOVLLM_SERVERPOOL_NUM_KVCACHE_BLOCKS"
# Its blocks are of 256 tokens, ours of 16: attention.base.BLOCK_SIZE, which would bring torch into Triton's stub.
_OF_OURS_IN_UPSTREAMS_BLOCK = 16
_LAYER_TARGETS = r"(q|k|v|o|gate|up|down)_proj"
_PROJECTION_TARGETS = r"(enc_to_lm|lm_to_dit|res_to_dit|fusion_concat)_proj"


class EngineConfig(BaseSettings):
    """Settings of one engine. A field that is None is decided when the device and the checkpoint are known."""

    model_config = SettingsConfigDict(
        env_prefix="DQ_ENGINE_", extra="forbid", protected_namespaces=(), env_ignore_empty=True
    )

    model: str = Field(description="checkpoint directory, or the id of a repository on the Hugging Face hub")
    device: str = Field(
        default="auto",
        pattern=rf"^{_DEVICE}$",
        description="auto, auto:N (GPU N, without GPUs the CPU), cpu, cuda or cuda:N",
    )
    devices: str = Field(
        default="",
        pattern=rf"^((\d+|{_DEVICE})(,(\d+|{_DEVICE}))*)?$",
        description="an engine worker on each of these, as 0,1 (N is auto:N) or cpu,cpu; empty = one on `device`",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=8, description="GPUs that share one engine: a worker's device and those after it"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of the language models and LocDiT; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    attention: Literal["auto", "sdpa"] = Field(
        default="auto", description="auto uses kernels of our own on a GPU, where they take the dtype and the heads"
    )
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of one operation; 0 = half of the cores")
    inference_timesteps: int = Field(default=10, ge=1, le=100, description="Euler steps of the diffusion, per patch")
    max_num_seqs: int | None = Field(
        default=None, ge=1, le=4096, description="streams at once; 512 on a GPU, 16 on a CPU"
    )
    max_num_batched_tokens: int = Field(default=8192, ge=1, description="most tokens in one step")
    max_model_len: int | None = Field(
        default=None, ge=16, description="most tokens and patches of one stream; min(4096, the checkpoint's max_length)"
    )
    max_prefill_tokens: int = Field(default=0, ge=0, description="most prompt tokens in one step; 0 = no own limit")
    max_prefill_seqs: int = Field(default=0, ge=0, description="most prompts in one step; 0 = no own limit")
    realtime: bool = Field(
        default=True,
        description="protect running streams from new ones, which may wait though slots are free; "
        "0 = most throughput, for offline work",
    )
    prefill_graph: bool = Field(default=True, description="run prompts in CUDA graphs; 0 = without")
    prefill_buckets: str = Field(
        default="",
        description="requests:tokens,... of those graphs, as in 1:320,2:640,4:1152,8:2176; empty = finer ones",
    )
    gpu_latents: bool = Field(
        default=True, description="hand latents to the AudioVAE on the GPU; 0 = by way of the host, to compare"
    )
    vae_compile: bool = Field(
        default=True, description="fused kernels for the AudioVAE on a GPU; 0 = plain torch, to compare"
    )
    vae_weight_norm_fold: bool = Field(
        default=True, description="always done, and without effect on the audio; 0 is refused"
    )
    enforce_eager: bool = Field(default=False, description="run a GPU without CUDA graphs")
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, description="share of the GPU's memory to fill")
    num_kvcache_blocks: int = Field(default=0, ge=0, description="KV blocks of 16 tokens; 0 = what fits the memory")
    queue_size: int = Field(default=1024, ge=1, description="requests that may wait for a slot")
    queue_timeout_s: float | None = Field(
        default=None, gt=0, description="longest wait for a slot, in seconds; 10 on a GPU, 120 on a CPU"
    )

    step_timeout_s: float | None = Field(
        default=None, gt=0, description="a longer step means a new worker; 30 on a GPU, 600 on a CPU"
    )
    control_socket: str | None = Field(
        default=None, description="Unix socket for voxcpm2_encode and voxcpm2_admin; one in a private folder by default"
    )
    admin_token: SecretStr | None = Field(
        default=None, description="what callers of voxcpm2_admin must know; in the environment only; none = anybody may"
    )
    voices_dir: str | None = Field(default=None, description="folder of the stored voices; none are stored without one")
    voices_max_count: int = Field(default=1000, ge=0, description="stored voices")
    voices_max_bytes: int = Field(default=2**30, ge=0, description="bytes of all stored voices together")
    lora_max_loras: int = Field(default=0, ge=0, le=256, description="adapters on the device at once; 0 = no adapters")
    lora_max_rank: int = Field(default=32, ge=1, le=256, description="largest rank of an adapter")
    lora_max_registered: int = Field(default=256, ge=1, le=65536, description="adapters that may be registered")
    lora_dir: str | None = Field(default=None, description="folder of the adapters; none is read from elsewhere")
    lora_preload: str = Field(
        default="", description="adapters to register and load at the start: name=path,... or a folder's name alone"
    )
    lora_target_modules_lm: str = Field(
        default="q_proj,k_proj,v_proj,o_proj",
        pattern=rf"^(none|{_LAYER_TARGETS}(,{_LAYER_TARGETS})*)$",
        description="projections of the language models that adapters may change: some of q, k, v, o, gate, up, down, "
        "each with _proj, or none",
    )
    lora_target_modules_dit: str = Field(
        default="q_proj,k_proj,v_proj,o_proj",
        pattern=rf"^(none|{_LAYER_TARGETS}(,{_LAYER_TARGETS})*)$",
        description="projections of LocDiT that adapters may change, named likewise, or none",
    )
    lora_target_proj_modules: str = Field(
        default="enc_to_lm_proj,lm_to_dit_proj,res_to_dit_proj,fusion_concat_proj",
        pattern=rf"^(none|{_PROJECTION_TARGETS}(,{_PROJECTION_TARGETS})*)$",
        description="projections between the models that adapters may change, or none",
    )
    prefill_graph_lora: bool = Field(default=False, description="run prompts that use adapters in CUDA graphs too")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error; each request's end is a line of JSON at info"
    )
    timing: bool = Field(default=False, description="a line of times for each step in the log")
    trace_file: str = Field(default="", description="write a Chrome trace of the first steps into this file")
    trace_steps: int = Field(default=100, ge=1, le=10_000, description="how many steps that are")
    log_text: bool = Field(default=False, description="write the texts of requests into their lines")

    @property
    def adapters_to_preload(self) -> dict[str, str]:
        """Paths by name, from `lora_preload`."""
        return dict(_names_and_paths(self.lora_preload))

    def of_workers(self) -> list["EngineConfig"]:
        """The settings of each engine worker: `devices` one by one, each as its `device`, and a trace of its own."""
        names = self.devices.split(",") if self.devices else [self.device]
        names = [f"auto:{name}" if name.isdigit() else name for name in names]
        path = Path(self.trace_file)
        traces = [self.trace_file] * len(names)
        if self.trace_file and len(names) > 1:
            traces = [str(path.with_name(f"{path.stem}_{index}{path.suffix}")) for index in range(len(names))]
        return [
            self.model_copy(update={"device": name, "trace_file": trace})
            for name, trace in zip(names, traces, strict=True)
        ]

    @field_validator("*", mode="before")
    @classmethod
    def _decode(cls, value: object) -> object:
        """Text from the environment as UTF-8: Triton's stubs run Python in the C locale, which knows ASCII only."""
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value

    @field_validator("vae_weight_norm_fold")
    @classmethod
    def _always_folded(cls, value: bool) -> bool:
        if not value:
            raise ValueError("weight norm is always folded, 0 is not possible")
        return value

    @field_validator("prefill_buckets")
    @classmethod
    def _are_buckets(cls, value: str) -> str:
        parse_buckets(value)
        return value

    @field_validator("voices_dir")
    @classmethod
    def _is_there_or_made(cls, value: str | None) -> str | None:
        """When it is set, as `_is_a_folder`."""
        if value is not None:
            try:
                os.makedirs(_in_bytes(value), mode=0o700, exist_ok=True)
            except OSError as error:
                raise ValueError(f"{value} cannot be used: {error.strerror}") from None
        return value

    @field_validator("lora_dir")
    @classmethod
    def _is_a_folder(cls, value: str | None, info: ValidationInfo) -> str | None:
        """When it is set: a worker that is started again, while a share is down, say, serves without adapters."""
        if value is not None and info.data.get("lora_max_loras") and not os.path.isdir(_in_bytes(value)):
            raise ValueError(f"{value} is no folder, but lora_max_loras is {info.data['lora_max_loras']}")
        return value

    @field_validator("lora_preload")
    @classmethod
    def _can_be_preloaded(cls, value: str, info: ValidationInfo) -> str:
        adapters = _names_and_paths(value)
        if adapters and info.data.get("lora_max_loras") == 0:
            raise ValueError("there is no room for adapters (lora_max_loras is 0)")
        if twice := [name for name, count in Counter(name for name, _ in adapters).items() if count > 1]:
            raise ValueError(f'"{twice[0]}" is the name of two adapters')
        return value

    @classmethod
    def settings_customise_sources(cls, settings_cls, init_settings, env_settings, **_):
        return env_settings, InitSettingsSource(settings_cls, _upstream_settings()), init_settings

    @classmethod
    def from_parameters(cls, parameters: dict[str, str]) -> "EngineConfig":
        """Settings from config.pbtxt parameters (all strings), under the environment's.

        A DQ_ENGINE_* variable that no setting has is a warning in the log.

        Raises:
            ValueError: a parameter has no such setting, or a value is out of its limits; names each one.
        """
        if parameters.get("admin_token"):
            raise ValueError("admin_token: belongs into the environment; every client can read a model's parameters")
        _warn_of_unknown_variables(cls.model_config["env_prefix"], cls.model_fields)
        try:
            return cls(**{name: value for name, value in parameters.items() if value != ""})
        except ValidationError as error:
            faults = "; ".join(map(cls._fault, error.errors()))
            raise ValueError(f"engine settings: {faults}") from None

    @classmethod
    def _fault(cls, error: ErrorDetails) -> str:
        """What is wrong with a setting."""
        name = str(error["loc"][0])
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "missing":  # the only one without a default
            message = f"is required (variable {cls.model_config['env_prefix']}MODEL)"
        elif error["type"] == "extra_forbidden":
            message = "is no setting"
        elif error["type"] == "string_pattern_mismatch":
            message = f'"{error["input"]}" is not understood ({cls.model_fields[name].description})'
        return f"{name}: {message}"


def _in_bytes(path: str) -> bytes:
    """Triton's stubs run Python in the C locale, which takes no letters beyond ASCII in paths but as bytes."""
    return os.path.expanduser(path.encode("utf-8", "surrogateescape"))


def _names_and_paths(adapters: str) -> list[tuple[str, str]]:
    """Of name=path,name=path; a name alone is its own path."""
    parts = [part.partition("=") for part in adapters.split(",") if part.strip()]
    return [(name.strip(), (path if equals else name).strip()) for name, equals, path in parts]


def _upstream_settings() -> dict[str, int]:
    """What the environment says by nano-vllm-voxcpm's own name, whose KV blocks are of 256 tokens.

    Raises:
        ValueError: it is no whole number from 1.
    """
    text = os.environ.get(_UPSTREAM_BLOCKS, "").strip()
    if not text:
        return {}
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{_UPSTREAM_BLOCKS}: {text!r} is no whole number from 1")
    return {"num_kvcache_blocks": int(text) * _OF_OURS_IN_UPSTREAMS_BLOCK}


def _warn_of_unknown_variables(prefix: str, settings: Iterable[str]) -> None:
    known = [name.upper() for name in settings]
    for variable in sorted(os.environ):
        if variable.upper().startswith(prefix) and (name := variable.upper().removeprefix(prefix)) not in known:
            close = difflib.get_close_matches(name, known, 1)
            logger.warning("%s is no setting%s", variable, f"; did you mean {prefix}{close[0]}?" if close else "")


def resolve_checkpoint(model: str) -> Path:
    """The directory of a checkpoint, downloaded first when `model` is the id of a hub repository.

    Raises:
        CheckpointError: there is no such directory, and no such repository could be downloaded.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"{model} is neither a directory nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    # One of each kind of weight file is enough; other formats of the same weights are left on the hub.
    patterns = ["*.json", "*.safetensors", "audiovae.pth", "tokenizer*"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds; each says what went wrong
        endpoint = os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
        message = f"there is no directory {model}, and it could not be downloaded from {endpoint}: {error}"
        raise CheckpointError(message) from error
