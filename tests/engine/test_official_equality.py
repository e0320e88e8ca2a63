"""The engine gives what the official model gives, in every mode, on every shape of checkpoint."""

import json
from itertools import count, islice

import numpy as np
import pytest
import soundfile
from reference.checkpoints import SHAPES, SMALL
from reference.listening import Heard, assert_close, hear
from reference.official import Official, Spoken

from dq_engine.engine import DqCoreEngine, EngineConfig, Request

LATENTS, AUDIO = 1e-4, 1e-3
MODES = ["zero-shot", "control", "reference", "prompt", "both"]


def assert_equal(ours: Heard, theirs: Spoken, official: Official) -> None:
    margins = f"margins: quantization {theirs.quantization_margin:.1e}, stop {theirs.stop_margin:.1e}"
    assert_close(ours.latents, theirs.latents, LATENTS, official.patch_size, f"latents ({margins})")
    assert ours.finish_reason == theirs.finish_reason
    assert ours.stats["patches"] * official.patch_size == len(theirs.latents)
    assert_close(ours.audio, theirs.audio, AUDIO, official.patch_samples, "audio")
    assert 0.01 < np.abs(theirs.audio).max() < 1, "silent or clipped audio proves nothing"


@pytest.mark.parametrize("min_length", [2, 24])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(case, mode, min_length, reference_wav, prompt_wav):
    official = case.official
    theirs_fields, by_audio, by_latents = {}, {}, {}
    if mode == "control":
        theirs_fields["control"] = by_audio["control"] = by_latents["control"] = "low"
    if mode in ("reference", "both"):
        theirs_fields["reference"] = reference_wav
        by_audio["reference_audio"] = reference_wav.read_bytes()
        by_latents["reference_latents"] = official.encode(reference_wav, "reference")
    if mode in ("prompt", "both"):
        theirs_fields["prompt"] = ("so it is", prompt_wav)
        by_audio |= {"prompt_text": "so it is", "prompt_audio": prompt_wav.read_bytes()}
        by_latents |= {"prompt_text": "so it is", "prompt_latents": official.encode(prompt_wav, "prompt")}
    seeds = islice(count(100 * MODES.index(mode)), 20)
    seed, theirs = official.speak_clearly("oh no", seeds=seeds, min_length=min_length, max_length=26, **theirs_fields)
    assert min_length == 2 or len(theirs.latents) >= 24 * official.patch_size
    for fields in [by_audio, by_latents] if by_audio != by_latents else [by_audio]:
        request = Request(
            text="oh no",
            seed=seed,
            min_generate_length=min_length,
            max_generate_length=26,
            return_latents=True,
            **fields,
        )
        assert_equal(hear(case.engine.submit(request)), theirs, official)


def test_stops_fall_where_the_official_model_stops(case):
    """Ten seeds at once; some end early, some at the limit, not all at the same patch."""
    clear = ((seed, case.official.speak("oh", seed=seed)) for seed in count(1000))
    theirs = dict(islice(((seed, spoken) for seed, spoken in clear if spoken.is_clear), 10))
    streams = {seed: case.engine.submit(Request(text="oh", seed=seed, return_latents=True)) for seed in theirs}
    for seed, stream in streams.items():
        assert_equal(hear(stream), theirs[seed], case.official)
    assert {spoken.finish_reason for spoken in theirs.values()} == {"stop", "length"}
    assert len({len(spoken.latents) for spoken in theirs.values()}) >= 3


@pytest.mark.parametrize("patches", [1, 2])
def test_prompt_shorter_than_the_decoders_context(case, patches, reference_wav):
    """The official decoder starts from the last 3 patches of audio, the reference's among them."""
    reference = case.official.encode(reference_wav, "reference")
    prompt = reference[-patches * case.official.patch_size :]
    for mine, theirs_fields in [({}, {}), ({"reference_latents": reference}, {"reference": reference})]:
        fields = {"prompt": ("a", prompt), "max_length": 6, **theirs_fields}
        seed, theirs = case.official.speak_clearly("oh", seeds=range(20), **fields)
        request = Request(
            text="oh",
            prompt_text="a",
            prompt_latents=prompt,
            seed=seed,
            max_generate_length=6,
            return_latents=True,
            **mine,
        )
        assert_equal(hear(case.engine.submit(request)), theirs, case.official)


@pytest.mark.parametrize("timesteps", [1, 4, 60])
def test_number_of_diffusion_steps(open_case, timesteps):
    """With 60 the first two steps are zero, with 1 all of them: the patch is the noise."""
    case = open_case(SHAPES[0], inference_timesteps=timesteps)
    seed, theirs = case.official.speak_clearly("oh", seeds=range(20), timesteps=timesteps, max_length=8)
    request = Request(text="oh", seed=seed, max_generate_length=8, return_latents=True)
    assert_equal(hear(case.engine.submit(request)), theirs, case.official)


def test_guidance_and_temperature_of_each_request(open_case):
    """Together in one batch, each with its own."""
    case = open_case(SHAPES[1], realtime=False)
    settings = [(0.0, 1.0), (1.0, 0.5), (2.0, 0.2), (2.0, 1.0), (3.5, 1.3)]
    theirs = [
        case.official.speak_clearly(
            "oh no", seeds=range(20), cfg_value=cfg_value, temperature=temperature, min_length=24
        )
        for cfg_value, temperature in settings
    ]
    streams = [
        case.engine.submit(
            Request(
                text="oh no",
                seed=seed,
                cfg_value=cfg_value,
                temperature=temperature,
                min_generate_length=24,
                return_latents=True,
            )
        )
        for (cfg_value, temperature), (seed, _) in zip(settings, theirs, strict=True)
    ]
    for stream, (_, spoken) in zip(streams, theirs, strict=True):
        assert_equal(hear(stream), spoken, case.official)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The trained model that ships, in float32 for the official package, which goes by config.json."""
    path = tmp_path_factory.mktemp("small")
    for file in SMALL.iterdir():
        (path / file.name).symlink_to(file.resolve())
    config = json.loads((SMALL / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    with DqCoreEngine(EngineConfig(model=str(path), device="cpu", threads=1)) as engine:
        yield Official(path), engine


def test_trained_model(small, tmp_path):
    """Real weights, real text, a real stop; its own voice as the reference.

    Not with seed 0: there the official model itself makes 3e-4 of its latents of 1e-7 of the noise (with the nine
    seeds after it less than 4e-5).
    """
    official, engine = small
    text = "peter bought nine green toys"
    seed, theirs = official.speak_clearly(text, seeds=range(1, 20))
    ours = hear(engine.submit(Request(text=text, seed=seed, return_latents=True)))
    assert_equal(ours, theirs, official)
    assert theirs.finish_reason == "stop" and ours.stats["audio_s"] > 1
    voice = tmp_path / "voice.wav"
    soundfile.write(voice, theirs.audio, engine.sample_rate)
    seed, theirs = official.speak_clearly("lucy wants two old chairs", seeds=range(20), reference=voice)
    request = Request(
        text="lucy wants two old chairs", seed=seed, reference_audio=voice.read_bytes(), return_latents=True
    )
    assert_equal(hear(engine.submit(request)), theirs, official)
    assert theirs.finish_reason == "stop"
