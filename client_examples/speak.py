"""Speaks a text through the server, over a gRPC stream, into a wav, flac, mp3 or opus file.

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import json
import os
import queue
import sys
import time
import wave
from pathlib import Path

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

LONGEST_SILENCE_S = 150  # a request may wait 120 s for its turn
FORMATS = {".wav": "pcm16", ".flac": "flac", ".mp3": "mp3", ".opus": "opus", ".ogg": "opus"}
CUT_OFF = (
    "warning: the maximum length was reached, so the text may have been cut off: "
    "give more with --max-generate-length, or speak it sentence by sentence"
)
PORTS = "gRPC is on port 8001 by default, HTTP on 8000, metrics on 8002"
NO_ANSWER = {  # in gRPC's words, in ours
    "Connection refused": "nothing listens there; is the server running, and ready?",
    "Socket closed": "no gRPC is spoken there, or only with TLS (grpcs://)",
    "http1.x server": "no gRPC is spoken there, or only with TLS (grpcs://)",
    "http2 header": "no gRPC is spoken there, or a proxy does not let this through",
    "WRONG_VERSION": "no TLS is spoken there, so leave grpcs:// away",
    "CERTIFICATE": "its certificate is of no known authority (GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names a file of others)",
}
INTEGERS = {"seed": ("INT64", np.int64), "max_generate_length": ("INT32", np.int32)}


def stream(client: tritonclient.grpc.InferenceServerClient, fields: dict[str, str | bytes | int]):
    """Yields the responses to one request as they come; leaving the loop early cancels it.

    Raises:
        InferenceServerException: the server's error, or the connection was lost.
        TimeoutError: nothing came for LONGEST_SILENCE_S.
    """
    inputs = []
    for name, value in fields.items():
        kind, dtype = INTEGERS.get(name, ("BYTES", np.object_))
        inputs.append(tritonclient.grpc.InferInput(name, [1], kind))
        inputs[-1].set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype))
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put(error or result))
    ended = False
    try:
        client.async_stream_infer("voxcpm2", inputs)
        while True:
            try:
                response = responses.get(timeout=LONGEST_SILENCE_S)
            except queue.Empty:
                raise TimeoutError(f"nothing came from the server for {LONGEST_SILENCE_S} s") from None
            if isinstance(response, Exception):
                ended = True
                raise response
            ended = response.as_numpy("finish_reason") is not None  # only the last one has it
            yield response
            if ended:
                return
    finally:
        # Not after the end: Triton 2.51 never frees a request that is cancelled then, nor unloads its model.
        client.stop_stream(cancel_requests=not ended)


def connect(url: str) -> tritonclient.grpc.InferenceServerClient:
    """A client of a server that is ready; grpcs:// before the address stands for TLS."""
    scheme, _, address = url.rstrip("/").rpartition("://")
    client = tritonclient.grpc.InferenceServerClient(address, ssl=scheme in ("grpcs", "https"))
    try:
        ready = client.is_model_ready("voxcpm2", client_timeout=10)
    except InferenceServerException as error:
        why = next((ours for words, ours in NO_ANSWER.items() if words in error.message()), error.message())
        sys.exit(f"error: no answer from {address}: {why} ({PORTS})")
    if not ready:
        sys.exit(f"error: the model voxcpm2 is not ready on {address}")
    return client


def write(path: Path, audio: bytes, rate: int, seconds: float | None) -> None:
    """Writes what the server sent; a wav file gets its header, a whole flac file the length that its header lacks."""
    if path.suffix.lower() == ".wav":
        with open(path, "wb") as file, wave.open(file) as wav:
            wav.setparams((1, 2, rate, 0, "NONE", None))  # mono, 16 bits
            wav.writeframes(audio)
        return
    if path.suffix.lower() == ".flac" and seconds is not None:
        samples = round(seconds * rate)
        length = bytes([audio[21] & 0xF0 | samples >> 32]) + (samples & 0xFFFFFFFF).to_bytes(4, "big")
        audio = audio[:21] + length + audio[26:]
    path.write_bytes(audio)


def utf8(words: str) -> str:
    """An argument that the server can read: argparse names the one that is not UTF-8."""
    words.encode()
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak a text through the server, over gRPC, into a file.")
    parser.add_argument("text", type=utf8, help="what to say")
    url = os.environ.get("VOXCPM_URL") or "localhost:8001"
    parser.add_argument("--url", default=url, help="gRPC address of the server, or VOXCPM_URL (%(default)s)")
    parser.add_argument("--control", type=utf8, help="description of the voice or the style")
    parser.add_argument("--voice", type=utf8, help="name of a stored voice")
    parser.add_argument("--reference", type=Path, metavar="WAV", help="recording of the voice to clone")
    parser.add_argument("--prompt-audio", type=Path, metavar="WAV", help="recording to continue, with --prompt-text")
    parser.add_argument("--prompt-text", type=utf8, help="the words of --prompt-audio")
    parser.add_argument("--lora", type=utf8, help="name of a registered adapter")
    parser.add_argument("--seed", type=int, help="the same seed gives the same audio; drawn if absent")
    parser.add_argument("--max-generate-length", type=int, metavar="N", help="most patches of audio, 160 ms each")
    parser.add_argument("--output", default="out.wav", type=Path, help=".wav, .flac, .mp3, .opus or .ogg (%(default)s)")
    args = parser.parse_args()
    if args.output.suffix.lower() not in FORMATS:
        sys.exit(f"error: --output: {args.output} must end in one of {', '.join(FORMATS)}")
    if not args.output.parent.is_dir():
        sys.exit(f"error: --output: there is no directory {args.output.parent}")
    for option, value, bits in ("--seed", args.seed, 63), ("--max-generate-length", args.max_generate_length, 31):
        if value is not None and not 0 <= value < 2**bits:
            sys.exit(f"error: {option}: must be between 0 and 2^{bits} - 1, got {value}")
    names = ("text", "control", "voice", "prompt_text", "lora", "seed", "max_generate_length")
    fields = {name: getattr(args, name) for name in names}
    fields["reference_audio"] = args.reference and args.reference.read_bytes()
    fields["prompt_audio"] = args.prompt_audio and args.prompt_audio.read_bytes()
    fields = {name: value for name, value in fields.items() if value is not None}
    fields["output_format"] = FORMATS[args.output.suffix.lower()]

    chunks, first = [], None
    with connect(args.url) as client:  # unclosed, it may hang when Python exits
        began = time.perf_counter()
        try:
            for response in stream(client, fields):
                chunks.append(response.as_numpy("audio_bytes")[0])
                rate = int(response.as_numpy("sample_rate")[0])
                first = first or (time.perf_counter() if chunks[-1] else None)
        except (InferenceServerException, TimeoutError) as error:
            if first is None:
                raise
            write(args.output, b"".join(chunks), rate, None)
            sys.exit(f"error: {explain(error)} ({args.output} is partial: it holds what came before)")
        end = time.perf_counter()
    reason, stats = (response.as_numpy(name)[0].decode() for name in ("finish_reason", "stats"))
    seconds = json.loads(stats)["audio_s"]
    write(args.output, b"".join(chunks), rate, seconds)
    print(f"{args.output}: {seconds:.2f} s of audio, finish reason: {reason}")
    print(f"TTFB {1e3 * (first - began):.0f} ms, RTF {(end - first) / seconds:.2f}")
    if reason == "length":
        print(CUT_OFF, file=sys.stderr)


def explain(error: Exception) -> str:
    """What went wrong; the server's own errors begin with their code and have no status."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if not isinstance(error, InferenceServerException):
        return str(error)
    return error.message() if error.status() is None else f"the connection was lost: {error.message()}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("cancelled")
    except (InferenceServerException, OSError) as error:
        sys.exit(f"error: {explain(error)}")
