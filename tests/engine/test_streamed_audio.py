"""Streamed audio is the official offline decode of the same latents, whatever else the decoder's slots hold."""

import queue
import threading

import numpy as np
import pytest
from reference.checkpoints import SHAPES
from reference.listening import Heard, assert_close, hear, heard

from dq_engine.engine import Chunk, Request

LIMIT = 1e-4


def assert_as_decoded_offline(ours: Heard, case, context: np.ndarray | None, what: str) -> None:
    """Every chunk is whole patches, and no sample of any of them differs from the offline decode."""
    expected = case.official.decode(ours.latents, context)
    samples = case.official.patch_samples
    assert all(len(chunk) % samples == 0 and len(chunk) for chunk in ours.chunks)
    assert len(ours.chunks[0]) == samples, "the first chunk goes out at once"
    assert_close(ours.audio, expected, LIMIT, samples, what)


@pytest.fixture(scope="module")
def contexts(case, reference_wav, prompt_wav) -> dict[str, tuple[dict, np.ndarray | None]]:
    """Per mode, the request's fields and what the decoder sees before the first patch."""
    reference, prompt = case.official.encode(reference_wav, "reference"), case.official.encode(prompt_wav, "prompt")
    prompt = np.concatenate([prompt] * 2)[-4 * case.official.patch_size :]
    context = prompt[-3 * case.official.patch_size :]
    prompt_fields = {"prompt_text": "a", "prompt_latents": prompt}
    return {
        "zero-shot": ({}, None),
        "reference": ({"reference_latents": reference}, None),
        "prompt": (prompt_fields, context),
        "both": ({"reference_latents": reference, **prompt_fields}, context),
    }


@pytest.mark.parametrize("mode", ["zero-shot", "reference", "prompt", "both"])
def test_one_stream(case, contexts, mode):
    fields, context = contexts[mode]
    request = Request(text="oh", seed=7, min_generate_length=24, max_generate_length=26, return_latents=True, **fields)
    assert_as_decoded_offline(hear(case.engine.submit(request)), case, context, mode)


def test_latents_to_continue_from(case):
    """What a stream returned is the next one's prompt; its first sample follows on the last of the offline decode."""
    first = hear(case.engine.submit(Request(text="oh", seed=1, max_generate_length=5, return_latents=True)))
    prompt = ("oh", first.latents)
    seed, theirs = case.official.speak_clearly("no", prompt=prompt, seeds=range(20), max_length=5)
    request = Request(
        text="no",
        prompt_text="oh",
        prompt_latents=first.latents,
        seed=seed,
        max_generate_length=5,
        return_latents=True,
    )
    second = hear(case.engine.submit(request))
    assert_as_decoded_offline(second, case, first.latents[-3 * case.official.patch_size :], "continuation")
    assert_close(second.latents, theirs.latents, 1e-4, case.official.patch_size, "latents of the continuation")


@pytest.mark.parametrize("reference", [False, True], ids=["alone", "with a reference"])
def test_a_continuation_is_the_rest_of_one_longer_run(case, contexts, reference):
    """Without noise, which a request draws anew, a patch depends on what is before it alone: how it came there, as a
    prompt or by being generated, makes no difference."""
    fields = {"temperature": 0.0, "return_latents": True, **(contexts["reference"][0] if reference else {})}
    long = Request(text="oh no, so it is", min_generate_length=12, max_generate_length=12, **fields)
    whole = hear(case.engine.submit(long)).latents
    lengths = {"min_generate_length": 3, "max_generate_length": 3}  # rounding grows from patch to patch
    for patches in (1, 5, 9):
        start, end = patches * case.official.patch_size, (patches + 3) * case.official.patch_size
        prompt = {"prompt_text": "oh no, ", "prompt_latents": whole[:start]}
        rest = hear(case.engine.submit(Request(text="so it is", **prompt, **lengths, **fields))).latents
        assert_close(rest, whole[start:end], LIMIT, case.official.patch_size, f"after {patches} patches")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_while_others_start_end_and_are_cancelled(shape, open_case):
    """Four slots; two long streams are watched while the other two change hands all the time."""
    case = open_case(shape, max_num_seqs=4, realtime=False)
    log: list[tuple[str, str]] = []
    events: queue.Queue[str] = queue.Queue()
    collected: dict[str, list[Chunk]] = {}
    ended: dict[str, threading.Event] = {}
    streams = {}

    def submit(name: str, **fields) -> None:
        collected[name], ended[name] = [], threading.Event()

        def on_chunk(chunk: Chunk) -> None:
            log.append((name, chunk.finish_reason or "audio"))
            collected[name].append(chunk)
            events.put(name)
            if chunk.is_last:
                ended[name].set()

        streams[name] = case.engine.submit(Request(return_latents=True, **fields), on_chunk)

    prompt = np.random.default_rng(1).standard_normal((4 * shape.patch_size, shape.feat_dim)).astype(np.float32)
    long = {"min_generate_length": 70, "max_generate_length": 70}
    watched = {"long": None, "long continuation": prompt[-3 * shape.patch_size :]}
    submit("long", text="oh", seed=1, **long)
    submit("long continuation", text="oh", seed=2, prompt_text="a", prompt_latents=prompt, **long)
    others = 0
    while not all(ended[name].is_set() for name in watched):
        assert events.get(timeout=30)
        running = [name for name in streams if name not in watched and not ended[name].is_set()]
        if len(running) < 3 and not ended["long"].is_set():
            others += 1
            length = 2 + others % 5
            # Every third is to be cancelled: it would go on for long.
            submit(
                f"{'cancelled' if others % 3 == 0 else 'short'} {others}",
                text="no",
                seed=others,
                min_generate_length=length if others % 3 else 300,
                max_generate_length=length if others % 3 else 300,
                **({"prompt_text": "b", "prompt_latents": prompt[: shape.patch_size]} if others % 2 else {}),
            )
        for name in running:
            if name.startswith("cancelled") and len(collected[name]) >= 3:
                streams[name].cancel()
    for name, stream in streams.items():
        stream.cancel()
        assert ended[name].wait(30)
    for name, context in watched.items():
        assert_as_decoded_offline(heard(collected[name]), case, context, name)
    # The order of the log is that of the delivery: all of it really happened in between.
    last = min(index for index, (name, reason) in enumerate(log) if name in watched and reason == "length")
    meanwhile = log[:last]
    assert sum(reason == "cancelled" for _, reason in meanwhile) >= 3
    assert sum(reason == "length" for _, reason in meanwhile) >= 3
    for name in (name for name in streams if name.startswith("short")):
        other = heard(collected[name])
        if other.finish_reason == "length":
            context = prompt[: shape.patch_size] if int(name.split()[1]) % 2 else None
            assert_as_decoded_offline(other, case, context, name)
