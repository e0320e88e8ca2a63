"""Whether an engine under load still says the right words in the right voice and stops in time, with the small model.

    python benchmark/quality.py measure engine models/small --streams 1,32
    python benchmark/quality.py measure triton localhost:8001 --streams 1,8,32 --sentences 1000 --json quality.json

Every row speaks the same sentences with the same seeds, the first row's audio is what the others' is compared with.
Streams begin a fraction of a second after each other; beside every third runs one that is cancelled half-way.
"""

import asyncio
import enum
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import soundfile
import typer
from commands import in_a_folder, run
from judge import ONE_LEVEL, SAME_AUDIO, Judge, difference, summary
from load_options import counts
from quality_plot import plot
from speaker import SAMPLE_RATE, SpeakerModel, train_speaker_model
from speaking import EngineSpeaking, Speaking, Spoken, TritonSpeaking
from tqdm import tqdm
from utterances import MATRIX_MODES, MODES, PROMPTS, RECORDINGS, REFERENCES, VOICES, Utterance, make_utterances

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
SPEAKERS = Path(__file__).resolve().parent / "speakers.npz"
LEAVERS = {"min_generate_length": 60, "max_generate_length": 60}
LEAVE_AFTER = (3, 24)
"""Chunks; in turn. Those that stay long take blocks of the KV cache from others."""
LIMITS = {"words_right": 0.97, "voice_right": 0.95, "stopped_in_time": 0.98}
FREE_WORDS_RIGHT = 0.5
"""Of flite's own the recognizer finds 89%, of the small model's 59%."""
ROUNDED_OTHERWISE = 0.01
"""Of the sentences, at most, may have a value that is rounded to another level of the quantizer than alone."""
LOST_UNDER_LOAD = 0.005
"""Of the words that are right in the first row, so much may be wrong in another."""


class Engine(str, enum.Enum):
    engine = "engine"
    triton = "triton"


async def speak_all(
    speaking: Speaking, utterances: list[Utterance], streams: int, stagger_s: float = 0.05, leavers: bool = True
) -> list[Spoken]:
    """Speak utterances, `streams` at a time; how many are done is seen on a terminal.

    Args:
        stagger_s: between the beginnings of the first `streams`.
        leavers: with several streams, beside every third one more runs and is cancelled half-way.
    """
    slots = asyncio.Semaphore(streams)
    bar = tqdm(total=len(utterances), desc=f"{streams} streams: speaking", unit=" sentences", leave=False, disable=None)

    async def leave(index: int, utterance: Utterance) -> None:
        await asyncio.sleep(4 * stagger_s)  # what they have in common is in the cache by then
        leaver = {**utterance.fields(), **LEAVERS, "seed": utterance.seed + 1}
        await speaking.leave(leaver, LEAVE_AFTER[index // 3 % len(LEAVE_AFTER)])

    async def one(index: int, utterance: Utterance) -> Spoken:
        await asyncio.sleep(stagger_s * min(index, streams - 1))
        async with slots:
            parts = [speaking.speak(utterance.fields())]
            if streams > 1 and leavers and index % 3 == 2:
                parts.append(leave(index, utterance))
            spoken, *_ = await asyncio.gather(*parts)
            bar.update()
            return spoken

    with bar:
        return await asyncio.gather(*(one(index, utterance) for index, utterance in enumerate(utterances)))


def figures(judge: Judge, utterances: list[Utterance], spoken: list[Spoken], alone: list[Spoken]) -> dict:
    """The figures of a row, over all (words: of matrix sentences only, whose recognition is sure) and by mode.

    Args:
        alone: the same utterances, spoken one at a time.
    """
    pairs = tqdm(list(zip(utterances, spoken, strict=True)), "listening", leave=False, disable=None, unit=" sentences")
    verdicts = [judge.listen(u.sentence, s.samples, s.sample_rate, s.finish_reason) for u, s in pairs]
    differences = [difference(s.samples, a.samples) for s, a in zip(spoken, alone, strict=True)]
    row = summary(verdicts, [u.voice for u in utterances])
    row["modes"] = {}
    for mode in dict.fromkeys(u.mode for u in utterances):
        own = [index for index, utterance in enumerate(utterances) if utterance.mode == mode]
        row["modes"][mode] = summary([verdicts[i] for i in own], [utterances[i].voice for i in own])
    matrix = [verdict for verdict, u in zip(verdicts, utterances, strict=True) if u.mode != "free"]
    row["words_right"] = sum(v.words for v in matrix) / sum(v.of_words for v in matrix) if matrix else None
    row["same_audio"] = sum(d <= SAME_AUDIO for d in differences) / len(differences)
    row["far_apart"] = sum(d > ONE_LEVEL for d in differences)
    row["cached_tokens"] = sum(s.stats["cached_tokens"] for s in spoken)
    return row


async def measure_rows(speaking: Speaking, judge: Judge, utterances: list[Utterance], streams: list[int]) -> list[dict]:
    """A row of figures for each number of streams at once."""
    rows, alone = [], None
    for count in streams:
        print(f"{count} streams: {len(utterances)} sentences", flush=True)
        began = time.perf_counter()
        spoken = await speak_all(speaking, utterances, count)
        seconds = time.perf_counter() - began
        alone = alone or spoken
        row = {"streams": count, "wall_s": round(seconds, 1), **figures(judge, utterances, spoken, alone)}
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def failures(rows: list[dict], same_audio: bool) -> list[str]:
    """What is not as it must be, a line each.

    Args:
        same_audio: the audio of every row must be that of the first; so it is in float32, but for a sentence in
            hundreds in which a value was so near the middle between two levels of the quantizer that rounding decided.
            Even that one sounds the same: it is not far apart.
    """
    found = []
    for row in rows:
        limits = dict(LIMITS)
        if rows[0]["words_right"] is not None:
            limits["words_right"] = max(limits["words_right"], rows[0]["words_right"] - LOST_UNDER_LOAD)
        if same_audio:
            limits["same_audio"] = 1 - max(1, ROUNDED_OTHERWISE * row["sentences"]) / row["sentences"]
            if row["far_apart"]:
                found.append(f"{row['streams']} streams: {row['far_apart']} sentences are not the same audio at all")
        if "free" in row["modes"] and (right := row["modes"]["free"]["words_right"]) < FREE_WORDS_RIGHT:
            found.append(f"{row['streams']} streams: of free sentences only {100 * right:.2f}% of the words are right")
        for name, least in limits.items():
            if row[name] is not None and row[name] < least - 1e-9:
                found.append(f"{row['streams']} streams: {name} is {100 * row[name]:.2f}%, not {100 * least:.2f}%")
    return found


def _line(row: dict) -> str:
    words = "-" if row["words_right"] is None else f"{100 * row['words_right']:.2f}%"
    voice = "" if row["voice_right"] is None else f"voice {100 * row['voice_right']:.1f}%, "
    modes = ", ".join(f"{mode} {100 * figures['words_right']:.1f}%" for mode, figures in row["modes"].items())
    return (
        f"{row['streams']} streams: words right {words} ({modes}), {voice}"
        f"stopped in time {100 * row['stopped_in_time']:.1f}%, the same audio {100 * row['same_audio']:.1f}%; "
        f"long pauses {row['long_pauses']}, cut off {row['cut_off']}, runaway {row['runaway']}, "
        f"clipped {row['clipped']} of {row['sentences']}; {row['seconds']:.0f} s of audio in {row['wall_s']:.0f} s"
    )


@app.command()
def measure(
    engine: Annotated[Engine, typer.Argument(help="in this process, or a running server")],
    target: Annotated[str, typer.Argument(help="a checkpoint directory; for triton host:port of its gRPC")],
    streams: Annotated[str, typer.Option(help="at once, a row each; the first is what the others must equal")] = "1,32",
    sentences: Annotated[int, typer.Option(min=1, max=5000)] = 200,
    modes: Annotated[str, typer.Option(help="of " + ", ".join(MODES))] = ",".join(MATRIX_MODES),
    seed: Annotated[int, typer.Option(help="of sentences and noise")] = 0,
    kv_blocks: Annotated[int, typer.Option(min=0, help="engine: so few that streams are preempted; 0 = enough")] = 0,
    same_audio: Annotated[bool, typer.Option(help="all rows' audio must be the first's, as it is in float32")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", callback=in_a_folder, help="write the rows here")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", callback=in_a_folder, help="write a PNG")] = None,
) -> None:
    """Have sentences spoken and judge them; ends with 1 if what is heard is not good enough."""
    at_once, chosen = counts(streams), tuple(modes.split(","))
    if not at_once:
        raise typer.BadParameter("nothing to measure: give --streams")
    if not set(chosen) <= set(MODES):
        raise typer.BadParameter("--modes are of " + ", ".join(MODES))
    speakers = SpeakerModel.load(SPEAKERS)
    judge, utterances = Judge(speakers), make_utterances(sentences, seed, chosen)
    rows = asyncio.run(_run(engine, target, judge, utterances, at_once, kv_blocks))
    if json_path is not None:
        about = {"target": target, "seed": seed, "speaker_model_error": speakers.error}
        json_path.write_text(json.dumps({**about, "rows": rows}, indent=1))
    if picture is not None:
        plot(rows, picture)
    if found := failures(rows, same_audio):
        print("\n".join(found), file=sys.stderr)
        raise typer.Exit(1)


async def _run(
    engine: Engine, target: str, judge: Judge, utterances: list[Utterance], at_once: list[int], kv_blocks: int
) -> list[dict]:
    if engine is Engine.triton:
        from tritonclient.utils import InferenceServerException

        speaking = TritonSpeaking(target)
        try:
            await speaking.start()
            return await measure_rows(speaking, judge, utterances, at_once)
        except InferenceServerException as error:
            raise RuntimeError(error.message()) from error
        finally:
            await speaking.close()
    from dq_engine.engine import DqCoreEngine, EngineConfig

    # Every leaver is a stream more.
    config = EngineConfig(
        model=target, max_num_seqs=2 * max(at_once), realtime=False, num_kvcache_blocks=kv_blocks, queue_timeout_s=3600
    )
    with DqCoreEngine(config) as running:
        rows = await measure_rows(EngineSpeaking(running), judge, utterances, at_once)
        print(f"preemptions: {running.snapshot()['preemptions']}")
        return rows


@app.command()
def record(
    sentences: Annotated[int, typer.Option(min=10, help="of each voice to train on, and as many to test with")] = 150,
) -> None:
    """Make recordings/ and speakers.npz again, with flite (Debian: libflite1)."""
    import random

    sys.path.insert(0, str(RECORDINGS.parent.parent / "tools"))
    from train_small.flite import Flite
    from train_small.sentences import matrix_sentence

    flite, rng = Flite(), random.Random(0)
    RECORDINGS.mkdir(exist_ok=True)
    for kind, texts in (("reference", REFERENCES), ("prompt", PROMPTS)):
        for voice, text in texts.items():
            soundfile.write(RECORDINGS / f"{voice}_{kind}.flac", flite.say(text, voice), SAMPLE_RATE)
    voices = [*VOICES, "kal"]

    def corpus(held_out: bool) -> dict[str, list[np.ndarray]]:
        texts = [matrix_sentence(rng, held_out) for _ in range(sentences)]
        return {voice: [flite.say(text, voice).astype(np.float32) / 32768 for text in texts] for voice in voices}

    model = train_speaker_model(corpus(held_out=False), corpus(held_out=True))
    model.save(SPEAKERS)
    print(f"{SPEAKERS.name}: {100 * model.error:.1f}% of {model.tested} unseen recordings of {', '.join(voices)} wrong")


if __name__ == "__main__":
    run(app)
