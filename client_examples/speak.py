"""Speaks a text through the server, over a gRPC stream, into a 16-bit wav file.

Needs: pip install "tritonclient[grpc]"
"""

import argparse
import queue
import sys
import time
import wave
from pathlib import Path

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

LONGEST_SILENCE_S = 150  # a request may wait 120 s for its turn


def stream(client: tritonclient.grpc.InferenceServerClient, fields: dict[str, str | bytes | int]):
    """Yields the responses to one request as they come; leaving the loop early cancels it."""
    inputs = []
    for name, value in fields.items():
        kind, dtype = ("INT64", np.int64) if isinstance(value, int) else ("BYTES", np.object_)
        inputs.append(tritonclient.grpc.InferInput(name, [1], kind))
        inputs[-1].set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype))
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put(error or result))
    ended = False
    try:
        client.async_stream_infer("voxcpm2", inputs)
        while True:
            response = responses.get(timeout=LONGEST_SILENCE_S)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak a text through the server, over gRPC, into a wav file.")
    parser.add_argument("text", help="what to say")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server (%(default)s)")
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
    fields["reference_audio"] = args.reference and args.reference.read_bytes()
    fields["prompt_audio"] = args.prompt_audio and args.prompt_audio.read_bytes()
    fields = {name: value for name, value in fields.items() if value is not None} | {"output_format": "pcm16"}

    pcm, first = [], None
    with tritonclient.grpc.InferenceServerClient(args.url) as client:  # unclosed, it may hang when Python exits
        if not client.is_model_ready("voxcpm2", client_timeout=10):
            sys.exit(f"error: the model voxcpm2 is not ready on {args.url}")
        began = time.perf_counter()
        for response in stream(client, fields):
            first = first or time.perf_counter()
            pcm.append(response.as_numpy("audio_bytes")[0])
        end, rate = time.perf_counter(), int(response.as_numpy("sample_rate")[0])
    with open(args.output, "wb") as file, wave.open(file) as wav:
        wav.setparams((1, 2, rate, 0, "NONE", None))  # mono, 16 bits
        wav.writeframes(b"".join(pcm))
    seconds = sum(map(len, pcm)) / 2 / rate
    print(f"{args.output}: {seconds:.2f} s of audio, finish reason: {response.as_numpy('finish_reason')[0].decode()}")
    print(f"TTFB {1e3 * (first - began):.0f} ms, RTF {(end - first) / seconds:.2f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("cancelled")
    except queue.Empty:
        sys.exit(f"error: nothing came from the server for {LONGEST_SILENCE_S} s")
    except InferenceServerException as error:
        lost = error.status() == "StatusCode.UNAVAILABLE"  # the connection; the server's own codes begin its messages
        sys.exit(f"error: {'no answer from the server: ' if lost else ''}{error.message()}")
    except (OSError, OverflowError) as error:
        sys.exit(f"error: {error}")
