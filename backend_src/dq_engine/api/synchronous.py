"""The pool for use outside an event loop."""

import queue
from collections.abc import Iterator

import numpy as np

from dq_engine.api.pool import Pool, is_last
from dq_engine.serving.messages import StreamMessage


class SyncVoxCPM2ServerPool:
    """Engine workers for one checkpoint; made by `VoxCPM.from_pretrained` outside an event loop, and ready.

    The methods are those of `AsyncVoxCPM2ServerPool`, with the same parameters, results and errors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        try:
            pool.ready.result()
        except BaseException:  # Ctrl-C too: nobody would have the pool to stop it
            pool.stop()
            raise

    def stop(self) -> None:
        """End the workers; what runs in them ends with an error."""
        self._pool.stop()

    def get_model_info(self) -> dict:
        """sample_rate, encoder_sample_rate, output_sample_rate, channels, feat_dim, patch_size and model_path."""
        return self._pool.model_info()

    def encode_latents(self, wav: bytes, wav_format: str = "", purpose: str = "prompt") -> bytes:
        """A recording to latents; see `AsyncVoxCPM2ServerPool.encode_latents`."""
        return self._pool.encode(wav, purpose)

    def add_prompt(self, wav: bytes, wav_format: str, prompt_text: str) -> str:
        """Encode a recording to continue and keep it with its words; its `prompt_id`."""
        return self._pool.add_prompt(self.encode_latents(wav, wav_format), prompt_text)

    def remove_prompt(self, prompt_id: str) -> None:
        """Forget a stored prompt; KeyError if there is none of this id."""
        self._pool.remove_prompt(prompt_id)

    def register_lora(self, name: str, path: str) -> dict:
        """Offer an adapter under a name; see `AsyncVoxCPM2ServerPool.register_lora`."""
        return self._pool.register_lora(name, path)

    def unregister_lora(self, name: str) -> dict:
        """Take an adapter back; streams that use it finish. ValueError if there is none of this name."""
        return self._pool.unregister_lora(name)

    def list_loras(self) -> list[dict]:
        """The registered adapters, as {"name": name}, by name."""
        return self._pool.list_loras()

    def wait_for_ready(self) -> None:
        """Nothing: this pool is ready."""

    def generate(
        self,
        target_text: str,
        prompt_latents: bytes | None = None,
        prompt_text: str = "",
        prompt_id: str | None = None,
        max_generate_length: int | None = None,
        temperature: float = 1.0,
        cfg_value: float = 2.0,
        ref_audio_latents: bytes | None = None,
        lora_name: str | None = None,
        seed: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Speak a text; see `AsyncVoxCPM2ServerPool.generate`."""
        request = self._pool.request(
            target_text,
            prompt_latents,
            prompt_text,
            prompt_id,
            max_generate_length,
            temperature,
            cfg_value,
            ref_audio_latents,
            lora_name,
            seed,
        )
        messages: queue.SimpleQueue[StreamMessage] = queue.SimpleQueue()
        stream = self._pool.submit(request, messages.put)
        try:
            while True:
                message = messages.get()
                yield from self._pool.chunks(message)
                if is_last(message):
                    return
        finally:
            stream.cancel()  # nothing, where it has ended
