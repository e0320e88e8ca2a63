"""Speaks a text through the server, over HTTP (generate_stream, server-sent events), into a wav, flac, mp3 or opus
file.

Needs: pip install httpx
"""

import argparse
import base64
import json
import os
import sys
import time
import wave
from pathlib import Path

import httpx

LONGEST_SILENCE_S = 150  # a request may wait 120 s for its turn
FORMATS = {".wav": "pcm16", ".flac": "flac", ".mp3": "mp3", ".opus": "opus", ".ogg": "opus"}
CUT_OFF = (
    "warning: the maximum length was reached, so the text may have been cut off: "
    "give more with --max-generate-length, or speak it sentence by sentence"
)
PORTS = "HTTP is on port 8000 by default, gRPC on 8001, metrics on 8002"


def stream(client: httpx.Client, fields: dict[str, str | int]):
    """Yields the responses to one request as they come, as dictionaries; leaving the loop early cancels it.

    Raises:
        RuntimeError: the server's error, or it is no server.
        httpx.HTTPError: there is no answer, or the connection was lost.
    """
    with client.stream("POST", "/v2/models/voxcpm2/generate_stream", json=fields) as reply:
        if not reply.headers.get("content-type", "").startswith(("text/event-stream", "application/json")):
            what = f"{reply.status_code} {reply.reason_phrase}"
            raise RuntimeError(f"{reply.url} answers {what}: this is no server's HTTP port ({PORTS})")
        for line in filter(None, reply.iter_lines()):
            response = json.loads(line.removeprefix("data:"))
            if "audio_bytes" not in response:
                raise RuntimeError(response.get("error", line))
            yield response
            if "finish_reason" in response:  # only the last one has it
                return
    raise RuntimeError("the stream ended early")


def explain(error: httpx.HTTPError) -> str:
    """Why there is no answer, in our words where it may be the address."""
    if "Connection refused" in str(error):
        return "nothing listens there; is the server running, and ready?"
    if "SSL" in str(error) and "CERTIFICATE" not in str(error):
        return "no TLS is spoken there, so http:// in the place of https://"
    if isinstance(error, httpx.RemoteProtocolError):
        return "no HTTP is spoken there, or only with TLS (https://)"
    return str(error) or type(error).__name__


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
    parser = argparse.ArgumentParser(description="Speak a text through the server, over HTTP, into a file.")
    parser.add_argument("text", type=utf8, help="what to say")
    url = os.environ.get("VOXCPM_HTTP_URL") or "http://localhost:8000"
    parser.add_argument("--url", default=url, help="HTTP address of the server, or VOXCPM_HTTP_URL (%(default)s)")
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
    for name, path in ("reference_audio", args.reference), ("prompt_audio", args.prompt_audio):
        fields[name] = path and base64.b64encode(path.read_bytes()).decode()
    fields = {name: value for name, value in fields.items() if value is not None}
    fields["output_format"] = FORMATS[args.output.suffix.lower()] + "_base64"

    address = args.url if "://" in args.url else f"http://{args.url}"
    client = httpx.Client(base_url=address, timeout=httpx.Timeout(LONGEST_SILENCE_S, connect=10))
    chunks, began, first = [], time.perf_counter(), None
    try:
        for response in stream(client, fields):
            chunks.append(base64.b64decode(response["audio_bytes"]))  # nothing, while the request waits
            first = first or (time.perf_counter() if chunks[-1] else None)
    except (httpx.HTTPError, RuntimeError) as error:
        lost = isinstance(error, httpx.HTTPError)
        if first is None:
            sys.exit(f"error: no answer from {address}: {explain(error)} ({PORTS})" if lost else f"error: {error}")
        write(args.output, b"".join(chunks), response["sample_rate"], None)
        why = f"the connection was lost: {error}" if lost else error
        sys.exit(f"error: {why} ({args.output} is partial: it holds what came before)")
    end = time.perf_counter()
    seconds = json.loads(response["stats"])["audio_s"]
    write(args.output, b"".join(chunks), response["sample_rate"], seconds)
    print(f"{args.output}: {seconds:.2f} s of audio, finish reason: {response['finish_reason']}")
    print(f"TTFB {1e3 * (first - began):.0f} ms, RTF {(end - first) / seconds:.2f}")
    if response["finish_reason"] == "length":
        print(CUT_OFF, file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("cancelled")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except httpx.InvalidURL as error:
        sys.exit(f"error: --url: {error}")
