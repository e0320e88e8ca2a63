"""LocEnc's outputs of stored prompts: which patches of a step have to be encoded, and that each gets its own."""

from types import SimpleNamespace

import numpy as np
import torch
from unit.sequences import make_sequence

from dq_engine.prefill import PromptBatch
from dq_engine.prompt_encodings import PromptEncodings
from dq_engine.request import Request
from dq_engine.scheduler import Prefill
from dq_engine.sequence import PromptBuilder, StoredPrompt

WIDTH = 8


def a_sequence(stored: StoredPrompt | None, text: int = 4, reference: int = 3, prompt: int = 6, made: int = 2):
    """Reference, text, prompt, and patches that were generated before a preemption; patch n is full of n."""
    length = reference + text + prompt + made
    sequence = make_sequence(length, 8)
    sequence.patch_rows = np.array([*range(reference), *range(reference + text, length)], np.int64)
    sequence.patches = np.arange(len(sequence.patch_rows), dtype=np.float32)[:, None, None] + np.zeros((1, 4, 64))
    sequence.stored_prompt, sequence.slot, sequence.blocks = stored, 0, [0, 1]
    return sequence


def encode(patches: np.ndarray) -> torch.Tensor:
    """A stand-in for LocEnc, [n, WIDTH]: ten times the patch's number."""
    return torch.from_numpy(patches[:, 0, :1]).float().expand(-1, WIDTH) * 10


def run(batch: PromptBatch) -> tuple[list[float], list[float]]:
    """The numbers of the patches that were encoded, and of all patches as they came out."""
    new = batch.new_patches() if batch.num_new_patches else np.zeros((0, 4, 64), np.float32)
    assert len(new) == batch.num_new_patches == len(batch.adapters())
    outputs = batch.encoded(encode(new))
    assert outputs.shape == (batch.num_patches, WIDTH)
    return new[:, 0, 0].tolist(), (outputs[:, 0] / 10).tolist()


def whole(sequence) -> Prefill:
    return Prefill(sequence, 0, sequence.prompt_length)


STORED = StoredPrompt(b"ann", 3, 9)


def test_a_stored_prompt_is_encoded_once():
    encodings, everything = PromptEncodings(), [float(n) for n in range(11)]
    assert run(PromptBatch([whole(a_sequence(STORED))], 16, encodings)) == (everything, everything)
    beside = [0.0, 1.0, 2.0, 9.0, 10.0]
    assert run(PromptBatch([whole(a_sequence(STORED))], 16, encodings)) == (beside, everything)
    # With others in the step each patch stays where it belongs.
    longer = a_sequence(STORED, text=7)
    batch = PromptBatch([whole(longer), whole(a_sequence(None)), whole(longer)], 16, encodings)
    assert run(batch) == (beside + everything + beside, everything * 3)
    other = a_sequence(StoredPrompt(b"ann with an adapter", 3, 9))
    assert run(PromptBatch([whole(other)], 16, encodings)) == (everything, everything)


def test_a_prompt_that_is_taken_in_piece_by_piece():
    encodings, sequence = PromptEncodings(), a_sequence(STORED)
    begins = [(0, 9), (9, 2), (11, 2), (13, 2)]
    first = [run(PromptBatch([Prefill(sequence, *part)], 16, encodings)) for part in begins]
    assert first == [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([5, 6], [5, 6]), ([7, 8], [7, 8]), ([9, 10], [9, 10])]
    again = [run(PromptBatch([Prefill(sequence, *part)], 16, encodings)) for part in [(0, 8), (8, 7)]]
    assert again == [([0, 1, 2], [0, 1, 2, 3]), ([9, 10], [4, 5, 6, 7, 8, 9, 10])]


def test_what_is_kept_has_no_gaps():
    """The beginning of the prompt was found in the KV cache: nothing can be kept of what follows."""
    encodings, sequence = PromptEncodings(), a_sequence(STORED)
    for _ in range(2):
        assert run(PromptBatch([Prefill(sequence, 9, 6)], 16, encodings))[0] == [5, 6, 7, 8, 9, 10]
    run(PromptBatch([Prefill(sequence, 0, 9)], 16, encodings))
    assert run(PromptBatch([Prefill(sequence, 7, 2)], 16, encodings))[0] == [], "the two before 9 are there"
    assert run(PromptBatch([Prefill(sequence, 7, 3)], 16, encodings))[0] == [3, 4, 5], "one of these is not"
    assert run(PromptBatch([Prefill(sequence, 7, 3)], 16, encodings))[0] == []


def test_the_least_recently_used_makes_room():
    row = 4 * WIDTH
    encodings = PromptEncodings(max_bytes=2 * 6 * row)
    prompts = [StoredPrompt(name, 3, 9) for name in (b"a", b"b", b"c")]

    def encoded(prompt: StoredPrompt) -> int:
        return len(run(PromptBatch([whole(a_sequence(prompt))], 16, encodings))[0])

    a, b, c = prompts
    assert [encoded(prompt) for prompt in (a, b, a, c, a, b)] == [11, 11, 5, 11, 5, 11]


def test_what_a_prompt_is_kept_under():
    """Its latents and the adapter, with its version; not the text, nor the voice's name, which can be given anew."""
    builder = PromptBuilder(lambda text: [1] * len(text), 4, 64, 512, 16, 400)
    latents = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)

    def stored(adapter: bytes | None = None, latents: np.ndarray = latents, **fields) -> StoredPrompt | None:
        settings = {"text": "oh", "voice": "ann", "prompt_text": "no", "prompt_latents": latents} | fields
        lease = adapter and SimpleNamespace(adapter=SimpleNamespace(key=adapter))
        return builder.build(Request(**settings), None, 1, lease).stored_prompt

    assert stored(text="yes", voice="bob", reference_latents=latents) == StoredPrompt(stored().key, 2, 4)
    assert (stored().first, stored().last) == (0, 2)
    keys = {stored().key, stored(latents=latents + 1).key, stored(b"loud 1").key, stored(b"loud 2").key}
    assert len(keys) == 4
    assert stored(voice=None) is None
    assert stored(prompt_text=None, prompt_latents=None, reference_latents=latents) is None
