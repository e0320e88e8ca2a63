"""Clients of a storm: good requests, bad ones, and those that leave half-way, over gRPC and HTTP, each checked.

    python clients.py GRPC_URL HTTP_PORT SEED

runs a few of them until the process is killed, and prints what they find wrong.
"""

import asyncio
import base64
import contextlib
import io
import json
import random
import sys
import time
import wave
from collections import Counter
from dataclasses import dataclass, field

import grpc
import numpy as np
import tritonclient.grpc.aio as aioclient
from contract_inputs import inputs
from tritonclient.utils import InferenceServerException

PATCH = 7680
"""Samples."""
CLIENTS_OF_A_PROCESS = 4
LONGEST_WAIT_S = 120.0
TEXTS = ["peter sells nine green toys", "rachel wants five pretty flowers", "hello there", "so it is"]
REFERENCES = [np.random.default_rng(n).standard_normal((4 * n, 64)).astype(np.float32) for n in (3, 12, 30)]
BAD = [
    ({"text": ""}, "INVALID_ARG: text: "),
    ({"text": b"\xff\xfe"}, "INVALID_ARG: text: "),
    ({"text": "a", "seed": -1}, "INVALID_ARG: seed: "),
    ({"text": "a", "cfg_value": 11.0}, "INVALID_ARG: cfg_value: "),
    ({"text": "a", "max_generate_length": 100_000}, "INVALID_ARG: max_generate_length: "),
    ({"text": "a", "output_format": "8track"}, "INVALID_ARG: output_format: "),
    ({"text": "a", "reference_audio": b"RIFF, so to say"}, "INVALID_ARG: reference_audio: "),
    ({"text": "a", "reference_latents": REFERENCES[0] * np.float32(np.inf)}, "INVALID_ARG: reference_latents: "),
    ({"text": "a", "reference_latents": REFERENCES[0][:, :3]}, ""),  # Triton's own words
    ({"text": "a", "voice": "nobody"}, "NOT_FOUND: voice: "),
]
KNOWN = [
    {"text": TEXTS[0], "seed": 3},
    {"text": TEXTS[1], "seed": 4, "max_generate_length": 6, "min_generate_length": 6},
    {"text": TEXTS[0], "seed": 5, "max_generate_length": 12, "reference_latents": REFERENCES[1]},
    {"text": TEXTS[2], "seed": 6, "max_generate_length": 5, "prompt_text": TEXTS[3], "prompt_latents": REFERENCES[0]},
]
"""Requests whose audio is known from before the storm."""


class Answer(Exception):
    """A request ended with an error; the message is the server's."""


@dataclass
class Findings:
    """What became of the requests of a storm.

    Args:
        known: float32 [n] audio of each of KNOWN, from before the storm.
    """

    known: list[np.ndarray] | None = None
    counts: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.problems.append(what)


def recording(seed: int, seconds: float = 0.5) -> bytes:
    """A wav file of noise."""
    noise = (np.random.default_rng(seed).standard_normal(int(16000 * seconds)) * 3000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(noise.tobytes())
    return file.getvalue()


def connect(grpc_url: str) -> aioclient.InferenceServerClient:
    """A client with a connection of its own."""
    return aioclient.InferenceServerClient(grpc_url, channel_args=[("grpc.use_local_subchannel_pool", 1)])


def start(client: aioclient.InferenceServerClient, fields: dict):
    """A request on a stream of its own; what iterates over its (result, error) and has `cancel`."""

    async def requests():
        yield {"model_name": "voxcpm2", "inputs": inputs(fields)}

    return client.stream_infer(requests())


async def responses(client: aioclient.InferenceServerClient, fields: dict) -> list[aioclient.InferResult]:
    """All responses to a request.

    Raises:
        Answer: the server answered with an error.
        AssertionError: something came after the last response, or nothing was the last.
    """
    results, failure = [], None
    async for result, error in start(client, fields):
        assert failure is None, "a response after the error"
        assert not results or not _is_final(results[-1]), "a response after the final one"
        if error is None:
            results.append(result)
        failure = error
    if failure is not None:
        raise Answer(failure.message())
    assert results and _is_final(results[-1]), f"{len(results)} responses and no final one"
    return results


def _is_final(result: aioclient.InferResult) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


def spoken(results: list[aioclient.InferResult]) -> tuple[bytes, str, dict]:
    """A stream's audio as bytes, its reason and its stats.

    Raises:
        AssertionError: it has not exactly one reason, with the last response.
    """
    reasons = [result.as_numpy("finish_reason") for result in results]
    assert [reason is not None for reason in reasons] == [False] * (len(results) - 1) + [True], "not one reason, last"
    audio = []
    for result in results:
        samples, encoded = result.as_numpy("audio"), result.as_numpy("audio_bytes")
        audio.append(samples.tobytes() if samples is not None else encoded[0])
    return b"".join(audio), reasons[-1][0].decode(), json.loads(results[-1].as_numpy("stats")[0])


async def hear(client: aioclient.InferenceServerClient, fields: dict) -> np.ndarray:
    """The f32 audio of a request, float32 [n]."""
    return np.frombuffer(spoken(await responses(client, fields))[0], np.float32)


class StormClient:
    """One client, which makes requests one after the other.

    Args:
        grpc_url, http_port: of the server.
        seed: of its choices.
        findings: where it reports.
    """

    def __init__(self, grpc_url: str, http_port: int, seed: int, findings: Findings) -> None:
        self._grpc_url, self._http_port, self._findings = grpc_url, http_port, findings
        self._random = random.Random(seed)
        self._kinds = {
            self._good: 40,
            self._known: 10,
            self._bad: 10,
            self._leave: 20,
            self._good_over_http: 8,
            self._drop_http: 12,
        }

    async def run(self, ends: float) -> None:
        """Make requests until `ends`, of time.monotonic()."""
        self._client = connect(self._grpc_url)
        while time.monotonic() < ends:
            (kind,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
            name = kind.__name__.strip("_")
            try:
                await asyncio.wait_for(kind(), LONGEST_WAIT_S)
                self._findings.counts[name] += 1
            except Answer as answer:
                self._findings.counts["unavailable"] += 1
                self._findings.expect(str(answer).startswith("UNAVAILABLE: the queue is full"), f"{name}: {answer}")
                await asyncio.sleep(self._random.uniform(0.1, 0.5))
            except (AssertionError, asyncio.TimeoutError, grpc.RpcError, InferenceServerException, OSError) as error:
                self._findings.problems.append(f"{name}: {type(error).__name__}: {error}")
        await self._client.close()

    def _patience(self) -> float:
        """Seconds before a client leaves: some at once, some while they wait, some while they listen."""
        return self._random.choice([0.0, 0.3, 2.0, 8.0]) * self._random.random()

    def _draw(self) -> dict:
        fields = {"text": self._random.choice(TEXTS), "max_generate_length": self._random.choice([4, 24, 24, 60])}
        fields["max_generate_length"] = self._random.randint(1, fields["max_generate_length"])
        if self._random.random() < 0.5:
            fields["min_generate_length"] = self._random.randint(1, fields["max_generate_length"])
        voice = self._random.random()
        if voice < 0.3:
            fields["reference_latents"] = self._random.choice(REFERENCES)
        elif voice < 0.4:
            fields["reference_audio"] = recording(self._random.randrange(5))
        elif voice < 0.5:
            fields |= {"prompt_latents": self._random.choice(REFERENCES), "prompt_text": self._random.choice(TEXTS)}
        return fields

    async def _good(self) -> None:
        fields, sample_bytes = self._draw(), 4 * PATCH
        if self._random.random() < 0.3:
            fields["stream"] = False
        if self._random.random() < 0.4:
            fields["output_format"], sample_bytes = "pcm16", 2 * PATCH
            if self._random.random() < 0.5:
                fields["sample_rate"], sample_bytes = 16000, 2 * PATCH // 3
        self._check(fields, *spoken(await responses(self._client, fields)), sample_bytes)

    def _check(self, fields: dict, audio: bytes, reason: str, stats: dict, patch_bytes: int) -> None:
        patches, most = stats["patches"], fields["max_generate_length"]
        assert len(audio) == patches * patch_bytes, f"{len(audio)} bytes of {patches} patches"
        assert fields.get("min_generate_length", 1) <= patches <= most, f"{patches} patches of {most}"
        assert reason == "stop" or (reason, patches) == ("length", most), f"{reason} after {patches} patches of {most}"

    async def _known(self) -> None:
        number = self._random.randrange(len(KNOWN))
        audio = await hear(self._client, KNOWN[number])
        if self._findings.known is not None:
            expected = self._findings.known[number]
            assert audio.shape == expected.shape, f"{audio.size} samples, {expected.size} before the storm"
            difference = float(np.abs(audio - expected).max())
            assert difference < 1e-3, f"{difference} away from the audio before the storm"

    async def _bad(self) -> None:
        fields, start_of_message = self._random.choice(BAD)
        try:
            await responses(self._client, fields)
        except Answer as answer:
            # A full queue may be noticed before what is wrong with a recording.
            assert str(answer).startswith((start_of_message, "UNAVAILABLE: the queue is full")), str(answer)
        else:
            raise AssertionError(f"{fields} was served")

    async def _leave(self) -> None:
        stream = start(self._client, {**self._draw(), "min_generate_length": 1})
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            stream.cancel()

        leaving = asyncio.get_running_loop().call_later(self._patience(), leave)
        failure = None
        try:
            async for _, error in stream:
                failure = failure or error
        except asyncio.CancelledError:
            if not left:  # it is wait_for's
                raise
        finally:
            leaving.cancel()
        if failure is not None:
            raise Answer(failure.message())

    async def _good_over_http(self) -> None:
        fields = {"text": self._random.choice(TEXTS), "max_generate_length": self._random.randint(1, 20)}
        reader, writer = await self._post({**fields, "output_format": "pcm16_base64"})
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read()
        finally:
            writer.close()
        lines = [line for line in body.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: ")]
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        if b"200 OK" not in head or any("error" in event for event in events):
            raise Answer(json.loads(body)["error"] if not events else events[-1]["error"])
        assert ["finish_reason" in e and e["finish_reason"] != "" for e in events].count(True) == 1, "not one reason"
        audio = b"".join(base64.b64decode(event.get("audio_bytes") or "") for event in events)
        self._check(fields, audio, events[-1]["finish_reason"], json.loads(events[-1]["stats"]), 2 * PATCH)

    async def _drop_http(self) -> None:
        _, writer = await self._post({"text": self._random.choice(TEXTS), "max_generate_length": 24})
        await asyncio.sleep(self._patience())
        writer.transport.abort()  # what it had not read makes this a reset

    async def _post(self, fields: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = json.dumps(fields).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port, limit=2**24)
        head = "POST /v2/models/voxcpm2/generate_stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader, writer


async def storm(grpc_url: str, http_port: int, seed: int, count: int, seconds: float, findings: Findings) -> None:
    """`count` clients for so long; each finishes what it has begun."""
    ends = time.monotonic() + seconds
    clients = [StormClient(grpc_url, http_port, seed + number, findings) for number in range(count)]
    await asyncio.gather(*(client.run(ends) for client in clients))


async def _until_killed(grpc_url: str, http_port: int, seed: int) -> None:
    findings = Findings()
    running = asyncio.create_task(storm(grpc_url, http_port, seed, CLIENTS_OF_A_PROCESS, 3600, findings))
    while not running.done():
        await asyncio.sleep(0.1)
        while findings.problems:
            print(findings.problems.pop(0), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_until_killed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
