"""Streams through a real tritonserver: every kind of client, many at once, formats, metrics."""

import asyncio
import base64
import json
import threading

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from talk import LABELS, SAMPLES_PER_PATCH, TEXT, Talk, inputs, is_final, metrics, samples, speak, wait_until
from tritonclient.utils import InferenceServerException

GENERATE = "v2/models/voxcpm2/generate"
TOGETHER = 1e-3
"""Of full scale: a batch rounds its sums otherwise than one alone; the small model carries that on (6e-4 seen)."""


@pytest.fixture(scope="module")
def spoken(server):
    """TEXT with seed 3: float32 [n]."""
    return samples(speak(server, {"text": TEXT, "seed": 3}))


def post(server, fields: dict, stream: bool = False) -> httpx.Response:
    return httpx.post(f"http://{server.http_url}/{GENERATE}{'_stream' if stream else ''}", json=fields, timeout=60)


def test_grpc_stream(server, spoken):
    results = speak(server, {"text": TEXT, "seed": 3, "return_latents": True}, request_id="ann")
    assert {result.get_response().id for result in results} == {"ann"}
    assert all(result.as_numpy("sample_rate").tolist() == [48000] for result in results)
    *chunks, last = results
    for chunk in chunks:
        assert chunk.as_numpy("audio").dtype == np.float32
        assert chunk.as_numpy("audio").size % SAMPLES_PER_PATCH == 0
        assert chunk.as_numpy("finish_reason") is None
        assert chunk.as_numpy("latents") is None
        assert chunk.as_numpy("audio_bytes") is None
    assert chunks[0].as_numpy("audio").size == SAMPLES_PER_PATCH  # the first patch goes at once
    assert last.as_numpy("finish_reason").tolist() == [b"stop"]
    stats = json.loads(last.as_numpy("stats")[0])
    assert stats.keys() >= {"seed", "patches", "audio_s", "ttfb_ms", "queue_ms", "prompt_tokens", "cached_tokens"}
    assert stats["seed"] == 3
    assert stats["audio_s"] == pytest.approx(0.16 * stats["patches"])
    assert last.as_numpy("latents").shape == (4 * stats["patches"], 64)
    assert samples(results).size == SAMPLES_PER_PATCH * stats["patches"]
    np.testing.assert_allclose(samples(results), spoken, atol=1e-3)


def test_one_response_with_everything(server, spoken):
    (result,) = speak(server, {"text": TEXT, "seed": 3, "stream": False, "return_latents": True})
    assert is_final(result)
    np.testing.assert_allclose(result.as_numpy("audio"), spoken, atol=1e-3)
    assert result.as_numpy("finish_reason").tolist() == [b"stop"]
    assert result.as_numpy("latents").shape == (4 * spoken.size // SAMPLES_PER_PATCH, 64)


def test_latents_and_audio_files_go_in_and_a_length_comes_out(server):
    """A stream's own latents and audio as the prompt of the next."""
    (first,) = speak(server, {"text": TEXT, "seed": 3, "stream": False, "return_latents": True, "output_format": "wav"})
    # Streamed wav headers hold no length; a file that a client sends must.
    data = bytearray(first.as_numpy("audio_bytes")[0])
    data[4:8], data[40:44] = (len(data) - 8).to_bytes(4, "little"), (len(data) - 44).to_bytes(4, "little")
    for prompt in (
        {"prompt_latents": first.as_numpy("latents"), "prompt_text": TEXT},
        {"prompt_audio": bytes(data), "prompt_text": TEXT},
        {"reference_audio": base64.b64encode(data)},
        {"reference_latents": first.as_numpy("latents")},
    ):
        fields = {"text": TEXT, "max_generate_length": 3, "min_generate_length": 3, "stream": False, **prompt}
        (result,) = speak(server, fields)
        stats = json.loads(result.as_numpy("stats")[0])
        assert (result.as_numpy("finish_reason")[0], stats["patches"]) == (b"length", 3)
        assert stats["prompt_tokens"] > 29 + 10


def test_asyncio_stream(server, spoken):
    async def run() -> list:
        async with aioclient.InferenceServerClient(server.grpc_url) as client:

            async def requests():
                yield {"model_name": "voxcpm2", "inputs": inputs({"text": TEXT, "seed": 3}, aioclient)}

            results = []
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                results.append(result)
                if is_final(result):
                    return results

    results = asyncio.run(asyncio.wait_for(run(), 60))
    np.testing.assert_allclose(samples(results), spoken, atol=1e-3)


def test_http_generate_stream(server, spoken):
    response = post(server, {"text": TEXT, "seed": 3, "output_format": "pcm16_base64"}, stream=True)
    assert response.status_code == 200
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 1
    assert {event["sample_rate"] for event in events} == {48000}
    audio = b"".join(base64.b64decode(event.get("audio_bytes") or "", validate=True) for event in events)
    np.testing.assert_allclose(np.frombuffer(audio, "<i2") / 32767, np.clip(spoken, -1, 1), atol=1e-3)
    assert events[-1]["finish_reason"] == "stop"
    assert json.loads(events[-1]["stats"])["seed"] == 3


@pytest.mark.parametrize("output_format", ["f32", "pcm16_base64"])
def test_http_generate(server, spoken, output_format):
    response = post(server, {"text": TEXT, "seed": 3, "stream": False, "output_format": output_format})
    assert response.status_code == 200
    body = response.json()
    if output_format == "f32":
        audio = np.array(body["audio"], np.float32)
    else:
        audio = np.frombuffer(base64.b64decode(body["audio_bytes"], validate=True), "<i2") / 32767
    np.testing.assert_allclose(audio, spoken, atol=1e-3)
    assert (body["sample_rate"], body["finish_reason"]) == (48000, "stop")


def test_flat_latents_over_http(server):
    fields = {"text": TEXT, "stream": False, "max_generate_length": 2, "output_format": "pcm16_base64"}
    plain = post(server, fields).json()
    response = post(server, fields | {"reference_latents": [0.1] * 512})
    assert response.status_code == 200, response.text
    added = json.loads(response.json()["stats"])["prompt_tokens"] - json.loads(plain["stats"])["prompt_tokens"]
    assert added >= 2  # two patches of four frames


def test_sixteen_streams_at_once(server):
    alone = [samples(speak(server, {"text": TEXT, "seed": seed})) for seed in (0, 7, 15)]
    talks = [Talk(server, {"text": TEXT, "seed": seed}) for seed in range(16)]
    try:
        together = [talk.rest(120) for talk in talks]
    finally:
        for talk in talks:
            talk.close()
    for results in together:
        stats = json.loads(results[-1].as_numpy("stats")[0])
        assert samples(results).size == SAMPLES_PER_PATCH * stats["patches"]
        assert results[-1].as_numpy("finish_reason").tolist() == [b"stop"]
    for seed, expected in zip((0, 7, 15), alone, strict=True):
        np.testing.assert_allclose(samples(together[seed]), expected, atol=TOGETHER)


def test_two_requests_with_one_id_on_one_connection(server, spoken):
    with Talk(server, {"text": TEXT, "seed": 3}, request_id="same") as talk:
        talk.send({"text": TEXT, "seed": 3}, request_id="same")
        results = talk.rest() + talk.rest()
    assert samples(results).size == 2 * spoken.size
    assert [result.as_numpy("finish_reason") is not None for result in results].count(True) == 2


def test_two_requests_with_one_id_on_two_connections(server, spoken):
    with (
        Talk(server, {"text": TEXT, "seed": 3}, request_id="same") as first,
        Talk(server, {"text": "rachel wants five pretty flowers", "seed": 3}, request_id="same") as second,
    ):
        np.testing.assert_allclose(samples(first.rest()), spoken, atol=TOGETHER)
        assert samples(second.rest()).size != spoken.size


def test_only_the_outputs_that_are_asked_for(server):
    fields = {"text": TEXT, "max_generate_length": 2, "stream": False}
    with Talk(server, {"text": TEXT, "max_generate_length": 1}) as talk:
        talk.rest()
        talk.send(fields, outputs=[grpcclient.InferRequestedOutput("audio")])
        (result,) = talk.rest()
    assert [output.name for output in result.get_response().outputs] == ["audio"]
    assert result.as_numpy("audio").size == 2 * SAMPLES_PER_PATCH


def test_metrics(server):
    count = f"voxcpm2_ttfb_seconds_count{LABELS}"
    before = metrics(server).get(count, 0)
    speak(server, {"text": TEXT, "max_generate_length": 3})
    with Talk(server, {"text": ""}) as talk:
        assert talk.error() == "INVALID_ARG: text: is empty"
    wait_until(lambda: metrics(server)[count] == before + 1, 2, "one first chunk more")
    now = metrics(server)
    assert now[f"voxcpm2_active_streams{LABELS}"] >= 0
    assert now[f"voxcpm2_queued_streams{LABELS}"] >= 0
    bucket = 'voxcpm2_ttfb_seconds_bucket{model="voxcpm2",version="1",worker="0",le="+Inf"}'
    assert now[bucket] == now[count]
    assert 0 < now[f"voxcpm2_ttfb_seconds_sum{LABELS}"] < 60 * now[count]


def test_unary_infer_is_refused_by_triton(server):
    with (
        httpclient.InferenceServerClient(server.http_url) as client,
        pytest.raises(InferenceServerException, match="decoupled transaction policy"),
    ):
        client.infer("voxcpm2", inputs({"text": TEXT}, httpclient))


def test_threads_of_a_client_share_a_server(server):
    """Requests from many threads arrive in the one instance one after the other."""
    results, errors = {}, []

    def talk(seed: int) -> None:
        try:
            results[seed] = speak(server, {"text": "hello there", "seed": seed, "max_generate_length": 2})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    for seed, spoken in results.items():
        assert json.loads(spoken[-1].as_numpy("stats")[0])["seed"] == seed
        assert samples(spoken).size == 2 * SAMPLES_PER_PATCH
