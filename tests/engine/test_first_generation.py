"""VoxCPM 0.5B and 1.5 (architecture `voxcpm`): the engine gives what the official package gives."""

import json
import queue
from itertools import count, islice

import pytest
from reference.checkpoints import FIRST_GENERATION, SMALL
from reference.listening import assert_close, hear
from reference.recordings import write_voice

from dq_engine.engine import DqCoreEngine, EngineConfig, Request, RequestError
from dq_engine.errors import CheckpointError
from dq_engine.model.checkpoint import read_config
from dq_engine.serving.messages import Call, Failed, Result
from dq_engine.serving.operations import Operations


@pytest.fixture(scope="module", params=FIRST_GENERATION, ids=lambda shape: shape.name)
def case(request, open_case):
    return open_case(request.param)


@pytest.fixture(scope="module")
def prompt(case, tmp_path_factory):
    """0.217 s at the model's rate; no multiple of a patch."""
    path = tmp_path_factory.mktemp("prompt") / "prompt.wav"
    return write_voice(path, seconds=0.217, rate=case.engine.sample_rate, pitch=190, seed=2)


def assert_equal(ours, theirs, official) -> None:
    assert_close(ours.latents, theirs.latents, 1e-4, official.patch_size, "latents")
    assert ours.finish_reason == theirs.finish_reason
    assert_close(ours.audio, theirs.audio, 1e-3, official.patch_samples, "audio")
    assert 0.01 < abs(theirs.audio).max() < 1, "silent or clipped audio proves nothing"


def test_it_says_what_it_is(case):
    rate = case.shape.vae.get("sample_rate", 16_000)
    assert (case.engine.sample_rate, case.engine.encoder_sample_rate) == (rate, rate)
    assert case.engine.patch_samples == case.official.patch_samples


@pytest.mark.parametrize("min_length", [2, 16])
def test_without_a_prompt(case, min_length):
    seeds = islice(count(10), 20)
    fields = {"min_length": min_length, "max_length": 20}
    seed, theirs = case.official.speak_clearly("oh no", seeds=seeds, **fields)
    lengths = {"min_generate_length": min_length, "max_generate_length": 20}
    request = Request(text="oh no", seed=seed, return_latents=True, **lengths)
    assert_equal(hear(case.engine.submit(request)), theirs, case.official)


def test_with_a_prompt(case, prompt):
    """As a recording and as latents; the decoder starts from its last 2 patches, where VoxCPM2's takes 3."""
    latents = case.official.encode(prompt, "prompt")
    seed, theirs = case.official.speak_clearly("oh no", seeds=range(20), prompt=("so it is", prompt), max_length=12)
    for given in ({"prompt_audio": prompt.read_bytes()}, {"prompt_latents": latents}):
        request = Request(
            text="oh no", prompt_text="so it is", seed=seed, max_generate_length=12, return_latents=True, **given
        )
        assert_equal(hear(case.engine.submit(request)), theirs, case.official)


def test_a_prompt_of_one_patch(case, prompt):
    """The official package cuts two patches off its audio all the same, a generated one too; we do not."""
    latents = case.official.encode(prompt, "prompt")[-case.official.patch_size :]
    seed, theirs = case.official.speak_clearly("oh", seeds=range(20), prompt=("a", latents), max_length=6)
    given = {"prompt_text": "a", "prompt_latents": latents, "max_generate_length": 6}
    ours = hear(case.engine.submit(Request(text="oh", seed=seed, return_latents=True, **given)))
    assert_close(ours.latents, theirs.latents, 1e-4, case.official.patch_size, "latents")
    assert_close(ours.audio[case.official.patch_samples :], theirs.audio, 1e-3, case.official.patch_samples, "audio")


def test_many_at_once(case):
    """Ten streams in one batch; they end where the official model ends them."""
    clear = ((seed, case.official.speak("oh", seed=seed)) for seed in count(1000))
    theirs = dict(islice(((seed, spoken) for seed, spoken in clear if spoken.is_clear), 10))
    streams = {seed: case.engine.submit(Request(text="oh", seed=seed, return_latents=True)) for seed in theirs}
    for seed, stream in streams.items():
        assert_equal(hear(stream), theirs[seed], case.official)
    assert len({len(spoken.latents) for spoken in theirs.values()}) >= 3


@pytest.mark.parametrize("field", ["control", "reference_audio", "reference_latents"])
def test_what_it_does_not_know_is_refused(case, prompt, field):
    latents = case.official.encode(prompt, "prompt")
    value = {"control": "low", "reference_audio": prompt.read_bytes(), "reference_latents": latents}[field]
    with pytest.raises(RequestError, match=f"^INVALID_ARG: {field}: is for VoxCPM2; this model, a VoxCPM 0.5B or 1.5"):
        case.engine.submit(Request(text="oh", **{field: value}))


def test_stored_voices_have_prompts_only(open_case, prompt, tmp_path):
    engine = open_case(FIRST_GENERATION[0], voices_dir=str(tmp_path)).engine
    answers = queue.SimpleQueue()
    operations = Operations(engine, answers.put)

    def register(payload: bytes, given_as: str, **more) -> Result | Failed:
        arguments = {"name": given_as, "given_as_payload": given_as, **more}
        operations.handle(Call(1, "register_voice", arguments, payload))
        return answers.get(timeout=60)

    latents, _ = engine.encode(prompt.read_bytes(), "prompt")
    for payload, field in (prompt.read_bytes(), "reference_audio"), (latents.tobytes(), "reference_latents"):
        refused = register(payload, field)
        assert (refused.code, refused.message.partition(";")[0]) == ("INVALID_ARG", f"{field}: is for VoxCPM2")
    with pytest.raises(RequestError, match="^INVALID_ARG: reference_latents: is for VoxCPM2; "):
        engine.voices.register("a", latents, latents, "so it is")
    assert engine.voices.describe_all() == []
    assert register(prompt.read_bytes(), "prompt_audio", prompt_text="so it is").value["prompt_frames"] == len(latents)
    settings = {"text": "oh no", "seed": 1, "max_generate_length": 3, "return_latents": True}
    ours = hear(engine.submit(Request(voice="prompt_audio", **settings)))
    same = hear(engine.submit(Request(prompt_text="so it is", prompt_latents=latents, **settings)))
    assert_close(ours.latents, same.latents, 1e-4, engine.patch_size, "latents")


def test_adapters_are_refused(checkpoint):
    path, _ = checkpoint(FIRST_GENERATION[0])
    config = EngineConfig(model=str(path), device="cpu", lora_max_loras=1, lora_dir=str(path))
    with pytest.raises(CheckpointError, match="adapters are for VoxCPM2"):
        DqCoreEngine(config).start()


def test_what_a_configuration_leaves_out_is_as_in_the_official_package(tmp_path):
    """VoxCPM 0.5B's says neither its architecture nor anything of its AudioVAE."""
    raw = json.loads((SMALL / "config.json").read_text())
    for name in ("architecture", "audio_vae_config", "patch_size", "residual_lm_num_layers", "max_length"):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, _, first_generation = read_config(tmp_path)
    assert first_generation
    assert (config.patch_size, config.residual_lm_num_layers, config.max_length) == (2, 6, 4096)
    vae = config.audio_vae_config
    assert (vae.encoder_dim, vae.encoder_rates) == (128, [2, 5, 8, 8])
    assert (vae.decoder_dim, vae.decoder_rates) == (1536, [8, 8, 5, 2])
    assert (vae.sample_rate, vae.out_sample_rate, vae.sr_bin_boundaries) == (16_000, 16_000, None)
