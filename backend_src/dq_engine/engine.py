"""The engine: requests from any thread in, audio out through callbacks or iterators, one thread that runs the steps.

with DqCoreEngine(EngineConfig(model="models/small")) as engine:
    for chunk in engine.submit(Request(text="peter sells nine green toys")):
        play(chunk.samples)
"""

import gc
import queue
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.audio.encode_stage import Encoded, EncodeStage, Recording
from dq_engine.config import EngineConfig, resolve_checkpoint
from dq_engine.delivery import Delivery
from dq_engine.errors import RequestError, invalid
from dq_engine.intake import Intake
from dq_engine.kv_cache import BlockPool
from dq_engine.loading import Limits, Parts, load
from dq_engine.loop import EngineLoop
from dq_engine.lora.lease import Lease
from dq_engine.lora.registry import NO_ADAPTERS, AdapterRegistry
from dq_engine.pacing import Pacer
from dq_engine.parallel.leader import Followers, load_with_followers
from dq_engine.request import Chunk, Request
from dq_engine.scheduler import Scheduler
from dq_engine.sequence import FOR_VOXCPM2, PromptBuilder
from dq_engine.stream import Stream
from dq_engine.timing import StepTimes
from dq_engine.voices import VoiceStore

__all__ = ["Chunk", "DqCoreEngine", "EngineConfig", "Request", "RequestError", "Stream"]


class DqCoreEngine:
    """A continuous-batching engine for one VoxCPM2 checkpoint on one device. Any thread may call its methods."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._loop: EngineLoop | None = None
        self._adapters: AdapterRegistry | None = None
        self._followers: Followers | None = None
        """The other processes, with tensor parallelism."""
        self.voices: VoiceStore | None = None
        """The stored voices, if there is a folder for them."""

    def start(self, progress: Callable[[str, float], None] | None = None) -> "DqCoreEngine":
        """Load the checkpoint and begin to serve; returns when a first patch has been made.

        Python's garbage collection leaves what the process holds by then alone until `stop`.

        Args:
            progress: told what is being done and how far that is: 0 at its begin, then up to 1.

        Raises:
            CheckpointError: the checkpoint cannot be served.
            ValueError: the settings do not go together, or do not fit the device.
        """
        progress, path = progress or (lambda stage, fraction: None), resolve_checkpoint(self.config.model)
        if self.config.tensor_parallel_size == 1:
            parts = load(self.config, path, progress)
        else:
            parts, self._followers = load_with_followers(self.config, path, progress)
        try:
            self._serve(parts, progress)
        except BaseException:
            self.stop()
            raise
        return self

    def _serve(self, parts: Parts, progress: Callable[[str, float], None]) -> None:
        """Make the stages of what was loaded, and have them speak."""
        checkpoint, self._limits, self._runner = parts.checkpoint, parts.limits, parts.runner
        self.sample_rate, self.encoder_sample_rate = checkpoint.vae.out_sample_rate, checkpoint.vae.sample_rate
        self.patch_size, self.feat_dim = checkpoint.model.patch_size, checkpoint.model.feat_dim
        self.device = self._runner.device
        self.patch_samples = self.patch_size * checkpoint.vae.decoder_chunk_size
        self._prompts = PromptBuilder(
            checkpoint.tokenizer,
            self.patch_size,
            self.feat_dim,
            min(self._limits.max_model_len, self._limits.kv_tokens),
            BLOCK_SIZE,
            checkpoint.config.lm_config.vocab_size,
            checkpoint.first_generation,
        )
        scheduler = Scheduler(
            BlockPool(self._limits.num_kv_blocks, BLOCK_SIZE),
            self._limits.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.max_prefill_tokens,
            self.config.max_prefill_seqs,
        )
        self._patch_seconds = self.patch_samples / self.sample_rate
        pacer = Pacer(self._patch_seconds, self.config.max_num_batched_tokens, self.config.realtime)
        if self.config.voices_dir is not None:
            folder, most = Path(self.config.voices_dir).expanduser(), self.config.voices_max_count
            about = self.feat_dim, self.patch_size, FOR_VOXCPM2 if checkpoint.first_generation else ""
            self.voices = VoiceStore(folder, most, self.config.voices_max_bytes, *about)
        times = StepTimes(self.config.timing, self.config.trace_file, self.config.trace_steps)
        self._encode, self._delivery = EncodeStage(parts.encoder), Delivery(self.sample_rate, times)
        slots = self._limits.max_num_seqs
        self._intake = Intake(self._prompts, self._encode, slots, self.config.queue_size, self._release)
        self._loop = self._intake.loop = EngineLoop(
            scheduler,
            pacer,
            self._runner,
            parts.vae,
            times,
            self._delivery,
            self._limits.queue_timeout_s,
            self._intake.forget,
        )
        if checkpoint.lora is not None:
            folder, most = Path(self.config.lora_dir).expanduser(), self.config.lora_max_registered
            self._adapters = AdapterRegistry(checkpoint.lora, folder, most, self._loop.wake)
        progress("warming up", 0.0)
        request = Request(text="warm up", max_generate_length=2)
        try:
            for lease in (None,) if self._adapters is None else (None, self._adapters.warm_up_lease()):
                for _ in self._intake.submit(request, None, lease):
                    pass
        except RequestError as error:
            raise ValueError(f"the model does not run on this device: {error.message}") from error
        try:
            if self._adapters is not None and self.config.lora_preload:
                progress("loading adapters", 0.0)
                self._adapters.preload(self.config.adapters_to_preload)
        except RequestError as error:
            raise ValueError(f"lora_preload: {error.message}") from error
        pacer.forget()  # first steps are slow: kernels are compiled, memory is taken
        for rows, seconds in parts.step_seconds.items():
            pacer.costs.observe(rows, 0, seconds)
        for tokens, seconds in parts.prefill_seconds:
            pacer.costs.observe(0, tokens, seconds)
        self._loop.count_anew()
        self._delivery.count_anew()
        gc.collect()
        gc.freeze()  # a full collection would go through all that is there by now, 0.15 s in which all streams wait
        progress("warming up", 1.0)

    def submit(self, request: Request, on_chunk: Callable[[Chunk], None] | None = None) -> Stream:
        """Speak a request.

        Args:
            on_chunk: called with every chunk on the engine's delivery thread; must not block. Without it, iterate over
                the stream.

        Raises:
            RequestError: INVALID_ARG for a field that can be seen to be wrong, NOT_FOUND for a voice or an adapter
                that is not there, UNAVAILABLE when the queue is full or the engine is not serving. What turns out later
                (a broken recording, say) ends the stream.
        """
        self._check_started()
        if request.voice is not None:
            if self.voices is None:
                raise RequestError("NOT_FOUND", f'voice: there is no stored voice named "{request.voice}"')
            request = self.voices.get(request.voice).apply(request)
        request.validate(self.feat_dim, self.patch_size)
        self._prompts.check(request)
        if request.lora is None:
            return self._intake.submit(request, on_chunk, None)
        if self._adapters is None:
            raise RequestError("NOT_FOUND", f'lora: there is no registered adapter named "{request.lora}"')
        lease = self._adapters.lease(request.lora)
        try:
            return self._intake.submit(request, on_chunk, lease)
        except BaseException:
            self._adapters.release(lease)
            raise

    def encode(self, audio: bytes, purpose: str, field: str = "audio") -> tuple[np.ndarray, float]:
        """Encode a recording once, to be used in any number of requests.

        Args:
            audio: an audio file, or base64 of one; the limits are those of a request's recordings.
            purpose: "reference" or "prompt", which are padded differently.
            field: what errors call the recording.

        Returns:
            What a request's `reference_latents` or `prompt_latents` takes, float32 [frames, feat_dim], and the
            recording's length in seconds.

        Raises:
            RequestError: INVALID_ARG naming `audio` or `purpose`; UNAVAILABLE when too much waits to be encoded
                already, or the engine is not serving.
        """
        self._check_started()
        if purpose not in ("reference", "prompt"):
            raise invalid("purpose", f'must be "reference" or "prompt", got "{purpose}"')
        if not audio:
            raise invalid(field, "is empty")
        results: queue.SimpleQueue[list[Encoded] | RequestError] = queue.SimpleQueue()
        self._encode.submit([Recording(audio, field, is_prompt=purpose == "prompt")], results.put)
        result = results.get()
        if isinstance(result, RequestError):
            raise result
        return result[0].latents, result[0].seconds

    def register_lora(self, name: str, path: str | Path, digest: str | None = None) -> dict:
        """Read an adapter from `lora_dir` and offer it under a name; a name that is taken gets it as a new version.

        Args:
            name: 1 to 64 letters, digits, and _ . -
            path: of a folder with lora_weights.safetensors or .ckpt and lora_config.json, or of such a weights file;
                relative to `lora_dir`, or absolute and below it.
            digest: what `list_loras` says of the same files; others are refused. None for any.

        Returns:
            The adapter, as `list_loras` describes it.

        Raises:
            RequestError: NOT_FOUND, there is no such file; INVALID_ARG naming `name` or `path`, for a file that is no
                adapter of this model, or when too many are registered; UNAVAILABLE while another call changes `name`.
        """
        return self._registry().register(name, path, digest)

    def load_loras(self, names: Sequence[str]) -> None:
        """Load registered adapters before any stream does; see `AdapterRegistry.load`."""
        self._registry().load(names)

    def unregister_lora(self, name: str) -> dict:
        """Take an adapter back: new requests for it are answered NOT_FOUND, streams that use it finish.

        Returns:
            The adapter as it was, its state "draining" or "removed".

        Raises:
            RequestError: NOT_FOUND; UNAVAILABLE while another call changes `name`.
        """
        return self._registry().unregister(name)

    def list_loras(self) -> list[dict]:
        """The adapters; see `AdapterRegistry.list`."""
        return [] if self._adapters is None else self._adapters.list()

    def _check_started(self) -> None:
        if self._loop is None:
            raise RequestError("UNAVAILABLE", "the engine has not been started")

    def _release(self, lease: Lease) -> None:
        self._adapters.release(lease)

    def _registry(self) -> AdapterRegistry:
        if self._adapters is None:
            raise invalid("name", "this engine was started without room for adapters (lora_max_loras is 0)")
        return self._adapters

    @property
    def limits(self) -> Limits:
        """Sizes and times, those too that the settings left open."""
        return self._limits

    def snapshot(self) -> dict:
        """What the engine holds right now, and what it has done since its start (`dq_engine.metrics` names it all)."""
        scheduler, closed = self._loop.scheduler, self._loop.closed
        active = len(scheduler.running)
        return {
            "active": active,
            "queued": max(0, self._intake.accepted - active),
            "preempted": sum(sequence.admitted > 0 for sequence in list(scheduler.waiting)),
            "sample_rate": self.sample_rate,
            "slots": self._limits.max_num_seqs,
            "kv_blocks_total": scheduler.pool.num_blocks,
            "kv_blocks_free": scheduler.pool.num_available,
            "kv_blocks_cached": scheduler.pool.num_cached,
            "max_model_len": self._limits.max_model_len,
            "closed": closed and str(closed),
            "stalled": self._loop.turn_seconds > self._limits.step_timeout_s,
            "audio_seconds": self._patch_seconds * self._loop.counters["patches"],
            "vae_seconds": self._delivery.vae_seconds,
            "delivery_seconds": self._delivery.delivery_seconds,
            "recordings_waiting": self._encode.waiting,
            "recordings": self._encode.encoded,
            **self._loop.counters,
            **self._runner.counters,
            **(NO_ADAPTERS if self._adapters is None else self._adapters.snapshot()),
        }

    def stop(self) -> None:
        """End the engine; streams that still run end with UNAVAILABLE. One that could not start has ended by itself."""
        if self._loop is not None:
            closed = self._loop.stop()
            self._encode.stop(closed)
            if self._adapters is not None:
                self._adapters.stop()
            self._delivery.stop()
            gc.unfreeze()
        if self._followers is not None:
            self._runner.drop_graphs()  # NCCL does not let go of a group that a graph still uses
            self._followers.stop()

    def __enter__(self) -> "DqCoreEngine":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
