"""Speaks a text through the server, over HTTP (generate_stream, server-sent events), into a 16-bit wav file.

Needs: pip install httpx
"""

import argparse
import base64
import json
import sys
import time
import wave
from pathlib import Path

import httpx

LONGEST_SILENCE_S = 150  # a request may wait 120 s for its turn


def stream(client: httpx.Client, fields: dict[str, str | int]):
    """Yields the responses to one request as they come, as dictionaries; leaving the loop early cancels it."""
    with client.stream("POST", "/v2/models/voxcpm2/generate_stream", json=fields) as reply:
        for line in filter(None, reply.iter_lines()):
            response = json.loads(line.removeprefix("data:"))
            if "error" in response:
                raise RuntimeError(response["error"])
            yield response
            if "finish_reason" in response:  # only the last one has it
                return
    raise RuntimeError("the stream ended early")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak a text through the server, over HTTP, into a wav file.")
    parser.add_argument("text", help="what to say")
    parser.add_argument("--url", default="http://localhost:8000", help="HTTP address of the server (%(default)s)")
    parser.add_argument("--control", help="description of the voice or the style")
    parser.add_argument("--voice", help="name of a stored voice")
    parser.add_argument("--reference", type=Path, metavar="WAV", help="recording of the voice to clone")
    parser.add_argument("--prompt-audio", type=Path, metavar="WAV", help="recording to continue, with --prompt-text")
    parser.add_argument("--prompt-text", help="the words of --prompt-audio")
    parser.add_argument("--seed", type=int, help="the same seed gives the same audio; drawn if absent")
    parser.add_argument("--output", default="out.wav", help="the file to write (%(default)s)")
    args = parser.parse_args()
    names = ("text", "control", "voice", "prompt_text", "seed")
    fields = {name: getattr(args, name) for name in names}
    for name, path in ("reference_audio", args.reference), ("prompt_audio", args.prompt_audio):
        fields[name] = path and base64.b64encode(path.read_bytes()).decode()
    fields = {name: value for name, value in fields.items() if value is not None} | {"output_format": "pcm16_base64"}

    client = httpx.Client(base_url=args.url, timeout=httpx.Timeout(LONGEST_SILENCE_S, connect=10))
    pcm, began, first = [], time.perf_counter(), None
    for response in stream(client, fields):
        pcm.append(base64.b64decode(response["audio_bytes"]))  # nothing, while the request waits
        first = first or (time.perf_counter() if pcm[-1] else None)
    end, rate = time.perf_counter(), response["sample_rate"]
    with open(args.output, "wb") as file, wave.open(file) as wav:
        wav.setparams((1, 2, rate, 0, "NONE", None))  # mono, 16 bits
        wav.writeframes(b"".join(pcm))
    seconds = sum(map(len, pcm)) / 2 / rate
    print(f"{args.output}: {seconds:.2f} s of audio, finish reason: {response['finish_reason']}")
    print(f"TTFB {1e3 * (first - began):.0f} ms, RTF {(end - first) / seconds:.2f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("cancelled")
    except httpx.HTTPError as error:
        sys.exit(f"error: no answer from the server: {error}")
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
    except json.JSONDecodeError:
        sys.exit("error: no answer from the server: this is not a Triton server's HTTP port")
