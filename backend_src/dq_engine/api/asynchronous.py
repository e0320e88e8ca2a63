"""The pool for use inside an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from dq_engine.api.pool import Pool, is_last
from dq_engine.serving.messages import StreamMessage


class AsyncVoxCPM2ServerPool:
    """Engine workers for one checkpoint; made by `VoxCPM.from_pretrained` inside an event loop.

    Every method waits until the workers are ready. Errors are `ValueError`s where the call is wrong and `RuntimeError`s
    where it could not be served: a worker that dies fails its streams at once, and is started again.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def wait_for_ready(self) -> None:
        """Wait until all workers are ready.

        Raises:
            WorkerStartError: one of them could not start; says why.
        """
        await asyncio.shield(asyncio.wrap_future(self._pool.ready))

    async def stop(self) -> None:
        """End the workers; what runs in them ends with an error."""
        await asyncio.to_thread(self._pool.stop)

    async def get_model_info(self) -> dict:
        """sample_rate, encoder_sample_rate, output_sample_rate, channels, feat_dim, patch_size and model_path."""
        await self.wait_for_ready()
        return self._pool.model_info()

    async def encode_latents(self, wav: bytes, wav_format: str = "", purpose: str = "prompt") -> bytes:
        """Encode a recording once, to be used in any number of calls of `generate`.

        Args:
            wav: an audio file (wav, flac, ogg or mp3), 0.1 to 60 s.
            wav_format: looked for in the file itself; taken for the sake of programs that give it.
            purpose: "prompt" or "reference": silence fills up its last patch, at the left of a prompt, which is
                continued, as in nano-vllm-voxcpm, and at the right of a reference, as in the official model.

        Returns:
            float32 [frames, feat_dim] as bytes, frames a multiple of the patch size.

        Raises:
            ValueError: it cannot be taken; says why.
        """
        await self.wait_for_ready()
        return await asyncio.to_thread(self._pool.encode, wav, purpose)

    async def add_prompt(self, wav: bytes, wav_format: str, prompt_text: str) -> str:
        """Encode a recording to continue and keep it with its words; its `prompt_id`."""
        return self._pool.add_prompt(await self.encode_latents(wav, wav_format), prompt_text)

    async def remove_prompt(self, prompt_id: str) -> None:
        """Forget a stored prompt.

        Raises:
            KeyError: there is none of this id.
        """
        self._pool.remove_prompt(prompt_id)

    async def register_lora(self, name: str, path: str) -> dict:
        """Offer an adapter under a name; a name that is taken gets it as a new version.

        Args:
            path: of a folder with lora_weights.safetensors or .ckpt and lora_config.json, or of such a weights file.

        Returns:
            {"name": name}

        Raises:
            ValueError: it is no adapter of this model, or the pool was made without a lora_config.
        """
        await self.wait_for_ready()
        return await asyncio.to_thread(self._pool.register_lora, name, path)

    async def unregister_lora(self, name: str) -> dict:
        """Take an adapter back; streams that use it finish. ValueError if there is none of this name."""
        await self.wait_for_ready()
        return await asyncio.to_thread(self._pool.unregister_lora, name)

    async def list_loras(self) -> list[dict]:
        """The registered adapters, as {"name": name}, by name."""
        await self.wait_for_ready()
        return await asyncio.to_thread(self._pool.list_loras)

    async def generate(
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
    ) -> AsyncIterator[np.ndarray]:
        """Speak a text.

        Args:
            target_text: what to say, 1 to 4,096 characters.
            prompt_latents: a recording to continue: float32 [frames, feat_dim] as bytes, from `encode_latents`.
            prompt_text: its words.
            prompt_id: both of them, stored by `add_prompt`.
            max_generate_length: most patches; None is 6 for each token of the text and 10 more, 2,000 at most.
            temperature: scale of the noise, 0 to 2.
            cfg_value: weight of guidance, 0 to 10.
            ref_audio_latents: a recording of the voice to clone, as `prompt_latents`.
            lora_name: a registered adapter.
            seed: repeats a result; drawn if None.

        Yields:
            One patch of audio after the other, float32 [n] at `sample_rate`.

        Raises:
            ValueError: a parameter is wrong; names it and its limit.
            RuntimeError: the worker died, the pool was stopped, or the engine failed.
        """
        await self.wait_for_ready()
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
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[StreamMessage] = asyncio.Queue()

        def on_message(message: StreamMessage) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed with the stream still running
                loop.call_soon_threadsafe(messages.put_nowait, message)

        stream = self._pool.submit(request, on_message)
        try:
            while True:
                message = await messages.get()
                for chunk in self._pool.chunks(message):
                    yield chunk
                if is_last(message):
                    return
        finally:
            stream.cancel()  # nothing, where it has ended
