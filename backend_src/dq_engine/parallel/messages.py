"""What the process with the engine has the others do: the two calls of a runner, as msgpack frames in a pipe."""

from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import numpy as np

from dq_engine.scheduler import Prefill, Step
from dq_engine.sequence import Sequence, StoredPrompt

_LENGTH_BYTES = 4


class Slot(msgspec.Struct, frozen=True):
    """A sequence that gets a slot; the fields are those of `Sequence`, arrays as their bytes."""

    slot: int
    token_ids: bytes
    patches: bytes
    patch_rows: bytes
    blocks: list[int]
    seed: int
    cfg_value: float
    temperature: float
    prompt_tokens: int
    generated: int
    stored_prompt: StoredPrompt | None

    @classmethod
    def of(cls, s: Sequence) -> "Slot":
        arrays = s.token_ids.tobytes(), s.patches.tobytes(), s.patch_rows.tobytes()
        numbers = s.seed, s.cfg_value, s.temperature, s.prompt_tokens, s.generated
        return cls(s.slot, *arrays, list(s.blocks), *numbers, s.stored_prompt)

    def sequence(self, patch_size: int, feat_dim: int) -> Sequence:
        """A sequence that a runner cannot tell from the one that this was made of."""
        sequence = Sequence(
            stream=None,
            token_ids=np.frombuffer(self.token_ids, np.int64),
            patches=np.frombuffer(self.patches, np.float32).reshape(-1, patch_size, feat_dim),
            patch_rows=np.frombuffer(self.patch_rows, np.int64),
            keys=[],
            seed=self.seed,
            cfg_value=self.cfg_value,
            temperature=self.temperature,
            min_length=0,
            max_patches=0,
            return_latents=False,
            slot=self.slot,
            blocks=list(self.blocks),
            generated=self.generated,
            stored_prompt=self.stored_prompt,
        )
        sequence.prompt_tokens = self.prompt_tokens
        return sequence


class Start(msgspec.Struct, tag=True, frozen=True):
    """`Runner.start`."""

    slots: list[Slot]


class Run(msgspec.Struct, tag=True, frozen=True):
    """`Runner.run`; sequences are named by their slots.

    Args:
        prefills: slot, start, length.
        decodes: slot, prefilled, launched.
        grown: slot, the block's place in `blocks`, the block.
    """

    prefills: list[tuple[int, int, int]]
    decodes: list[tuple[int, int, int]]
    grown: list[tuple[int, int, int]]

    @classmethod
    def of(cls, step: Step) -> "Run":
        return cls(
            [(p.sequence.slot, p.start, p.length) for p in step.prefills],
            [(s.slot, s.prefilled, s.launched) for s in step.decodes],
            [(s.slot, len(s.blocks) - 1, s.blocks[-1]) for s in step.grown],
        )

    def step(self, sequences: dict[int, Sequence]) -> Step:
        """The step, on sequences by slot, which are brought up to date."""
        for slot, place, block in self.grown:
            sequences[slot].blocks[place:] = [block]
        for slot, prefilled, launched in self.decodes:
            sequences[slot].prefilled, sequences[slot].launched = prefilled, launched
        return Step(
            [Prefill(sequences[slot], start, length) for slot, start, length in self.prefills],
            [sequences[slot] for slot, _, _ in self.decodes],
            [sequences[slot] for slot, _, _ in self.grown],
        )


Message = Start | Run
_decode = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder().encode


def write(pipe: BinaryIO, message: Message) -> None:
    data = _encode(message)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def read_all(pipe: BinaryIO) -> Iterator[Message]:
    """Messages until the other end is closed."""
    while len(length := pipe.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        yield _decode(pipe.read(int.from_bytes(length, "little")))
