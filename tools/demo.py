"""`make demo`: one sentence through a real tritonserver, into a wav file and a picture of it.

The settings are the environment variables of the Makefile: MODEL, TEXT, REFERENCE, OUT.
"""

import json
import os
import re
import sys
import time
import wave
from pathlib import Path

import numpy as np
import tritonclient.grpc
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from triton_server import ROOT, ServerError, TritonServer
from tritonclient.utils import InferenceServerException

from dq_engine.config import resolve_checkpoint
from dq_engine.errors import CheckpointError

sys.path.insert(0, str(ROOT / "client_examples"))
from speak import explain, stream  # noqa: E402

SMALL_MODEL = ROOT / "models" / "small"
SENTENCE = "rachel wants five pretty flowers"
ABOUT_SMALL_MODEL = f"""\
The model is models/small, a stand-in: VoxCPM2's true architecture with 7.7 M parameters, trained on three voices of
the flite synthesizer. It says short English, best of all sentences like "{SENTENCE}".
For the real one: make demo MODEL=openbmb/VoxCPM2 (downloads it; made for a GPU), or MODEL=/directory/of/a/checkpoint
"""
ABOUT_ITS_VOICES = """\
It clones only the voices that it was trained on (models/small/README.md), such as that of
REFERENCE=benchmark/recordings/rms_reference.flac
"""
STAGE = re.compile(r"worker \d+: (.+)")
"""What the log says of a start: "loading the weights", or later "loading the weights, 43% done"."""
READY_TIMEOUT_S = 900.0  # a checkpoint of some GB on a slow disk
SEED = 0  # the same audio every time


class BrokenOff(Exception):
    """A stream ended with an error. What came before: `samples`, int16 [n], and their `rate` in Hz."""

    def __init__(self, message: str, samples: np.ndarray, rate: int) -> None:
        super().__init__(message)
        self.samples, self.rate = samples, rate


def main() -> None:
    model = os.environ.get("MODEL") or str(SMALL_MODEL)
    out = Path(os.environ.get("OUT") or "demo.wav")
    if not out.resolve().parent.is_dir():
        sys.exit(f"OUT: the directory {out.parent} does not exist")
    if out.suffix.lower() != ".wav":  # the picture beside it ends in .png
        sys.exit(f"OUT: {out} does not end in .wav")
    text = os.environ.get("TEXT") or SENTENCE
    try:
        text.encode()
    except UnicodeEncodeError:
        sys.exit("TEXT: is not UTF-8")
    fields = {"text": text, "seed": SEED, "output_format": "pcm16"}
    if reference := os.environ.get("REFERENCE"):
        fields["reference_audio"] = Path(reference).read_bytes()

    checkpoint = resolve_checkpoint(model)  # here, not in the server, so that a download's progress is seen
    if checkpoint.resolve() == SMALL_MODEL:
        print(ABOUT_SMALL_MODEL + (ABOUT_ITS_VOICES if reference else ""))
    try:
        samples, rate, ttfb, rtf, reason, stats = speak(checkpoint, fields)
    except BrokenOff as broken:
        write(out, broken.samples, broken.rate)
        sys.exit(f"error: {broken} ({out} is partial: it holds what came before)")
    write(out, samples, rate)
    picture = out.with_suffix(".png")
    draw(samples, rate, fields["text"], picture)
    print(f'"{fields["text"]}", seed {stats["seed"]}, finish reason: {reason}')
    print(f"TTFB {1e3 * ttfb:.0f} ms (request to first audio), RTF {rtf:.2f} (seconds for a second of audio, after it)")
    print(f"{out}: {len(samples) / rate:.2f} s of audio, 16-bit PCM, {rate} Hz")
    print(f"{picture}: its waveform and spectrogram")


def speak(checkpoint: Path, fields: dict) -> tuple[np.ndarray, int, float, float, str, dict]:
    """One request to a server of its own.

    Returns:
        samples (int16 [n]), sample rate in Hz, TTFB in seconds, RTF, finish reason, the server's stats.

    Raises:
        ServerError, InferenceServerException, TimeoutError: the server did not start; it refused the request; it is
            silent.
        BrokenOff: an error came after audio.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, TimeElapsedColumn()) as progress:
        starting = progress.add_task("starting the server", total=None, note="")

        def show(seconds: float, line: str) -> None:
            if stage := STAGE.search(line):
                progress.update(starting, note=stage[1])

        with TritonServer(model=checkpoint, ready_timeout_s=READY_TIMEOUT_S, on_progress=show) as server:
            progress.update(starting, total=100, completed=100, note=f"ready on {server.grpc_url} (gRPC)")
            speaking = progress.add_task("speaking", total=None, note="")
            pcm, first = [], None
            with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
                client.is_server_ready()  # connects, which is no part of TTFB
                began = time.perf_counter()
                try:
                    for response in stream(client, fields):
                        first = first or time.perf_counter()
                        pcm.append(response.as_numpy("audio_bytes")[0])
                        rate = int(response.as_numpy("sample_rate")[0])
                        seconds = sum(map(len, pcm)) / 2 / rate
                        progress.update(speaking, note=f"{seconds:.2f} s of audio")
                except (InferenceServerException, TimeoutError) as error:
                    if first is None:
                        raise
                    message = f"{explain(error)}; the server's log is {server.log_path}"
                    raise BrokenOff(message, np.frombuffer(b"".join(pcm), "<i2"), rate) from error
                wall = time.perf_counter() - began
            progress.update(speaking, total=1, completed=1)
            stopping = progress.add_task("stopping the server", total=None, note="")
        progress.update(stopping, total=1, completed=1)
    reason, stats = (response.as_numpy(name)[0].decode() for name in ("finish_reason", "stats"))
    ttfb = first - began
    return np.frombuffer(b"".join(pcm), "<i2"), rate, ttfb, (wall - ttfb) / seconds, reason, json.loads(stats)


def write(path: Path, samples: np.ndarray, rate: int) -> None:
    """A wav file of int16 samples [n]."""
    with open(path, "wb") as file, wave.open(file) as wav:
        wav.setparams((1, 2, rate, 0, "NONE", None))  # mono, 16 bits
        wav.writeframes(samples.tobytes())


def draw(samples: np.ndarray, rate: int, title: str, path: Path) -> None:
    """A picture of int16 samples [n]: the waveform above the spectrogram."""
    figure = Figure(figsize=(10, 6), dpi=120, layout="constrained")
    wave_axes, spectrum_axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    x = samples / 32768
    seconds = len(x) / rate
    wave_axes.plot(np.arange(len(x)) / rate, x, linewidth=0.4)
    wave_axes.set(title=title, ylabel="amplitude", ylim=(-1, 1), xlim=(0, seconds))
    # Digital silence has no logarithm: a window shorter than the audio is filled up, and nothing is below -160 dB.
    image = spectrum_axes.specgram(x, NFFT=1024, noverlap=768, Fs=rate, vmin=-160, cmap="magma")[3]
    spectrum_axes.set(xlabel="seconds", ylabel="Hz", ylim=(0, 12_000))
    figure.colorbar(image, ax=spectrum_axes, label="dB")
    figure.savefig(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("cancelled")
    except ServerError as error:
        # The end of its log, where the engine's own reason is worth more than the rest.
        reason = re.search(r"the engine did not start: (.+?)\\n", str(error))
        sys.exit(f"error: {reason[0][:-2] if reason else error}")
    except (CheckpointError, InferenceServerException, OSError) as error:
        sys.exit(f"error: {explain(error)}")
