"""The measure itself, on flite's own recordings: right as they are, wrong in each way that they can be spoiled."""

import numpy as np
import pytest
import quality_plot
import soundfile
from judge import difference, summary
from recognizer import Recognizer, errors, in_place
from speaker import SpeakerModel, train_speaker_model
from train_small.flite import VOICES
from train_small.sentences import is_held_out
from triton_server import ROOT
from utterances import MATRIX_MODES, PROMPTS, RECORDINGS, REFERENCES, make_utterances

RATE = 16000


def recording(voice: str, kind: str = "reference") -> np.ndarray:
    samples, rate = soundfile.read(RECORDINGS / f"{voice}_{kind}.flac", dtype="float32")
    assert rate == RATE
    return samples


@pytest.mark.parametrize("voice", VOICES)
def test_flites_own_audio_is_right(judge, voice):
    for kind, texts in (("reference", REFERENCES), ("prompt", PROMPTS)):
        verdict = judge.listen(texts[voice], recording(voice, kind), RATE, "stop")
        assert (verdict.words, verdict.voice, verdict.clipped) == (5, voice, 0)
        assert verdict.stopped_in_time and not verdict.cut_off and not verdict.runaway
        assert 0.05 < verdict.tail_s < 0.25 and verdict.pause_s < 0.3


def spoiled(how: str) -> tuple[np.ndarray, str]:
    samples, silence = recording("rms"), np.zeros(RATE, np.float32)
    middle = len(samples) // 2
    return {
        "other words": (recording("rms", "prompt"), "stop"),
        "cut off": (samples[: int(0.9 * RATE)], "stop"),
        "silence after it": (np.concatenate([samples, silence]), "stop"),
        "a pause": (np.concatenate([samples[:middle], silence, samples[middle:]]), "stop"),
        "never stops": (samples, "length"),
        "goes on": (np.concatenate([samples] * 3), "stop"),
        "too loud": (np.clip(8 * samples, -1, 1), "stop"),
        "backwards": (samples[::-1].copy(), "stop"),
        "nothing": (0 * samples, "stop"),
        "empty": (samples[:0], "stop"),
    }[how]


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("other words", {"words_right": 0.5}),
        ("cut off", {"words_right": 0.7, "stopped_in_time": 0, "cut_off": 1}),
        ("silence after it", {"stopped_in_time": 0}),
        ("a pause", {"long_pauses": 1}),
        ("never stops", {"stopped_in_time": 0, "runaway": 1}),
        ("goes on", {"stopped_in_time": 0, "runaway": 1}),
        ("too loud", {"clipped": 1}),
        ("backwards", {"words_right": 0.5}),
        ("nothing", {"words_right": 0.5, "stopped_in_time": 0, "cut_off": 1}),
        ("empty", {"words_right": 0.5, "stopped_in_time": 0, "cut_off": 1}),
    ],
)
def test_what_is_spoiled_is_found(judge, how, wrong):
    samples, reason = spoiled(how)
    right = summary([judge.listen(REFERENCES["rms"], recording("rms"), RATE, "stop")], ["rms"])
    found = summary([judge.listen(REFERENCES["rms"], samples, RATE, reason)], ["rms"])
    for name, value in wrong.items():
        if name in ("long_pauses", "cut_off", "runaway", "clipped"):
            assert (right[name], found[name]) == (0, value)
        else:
            assert right[name] == 1 and found[name] <= value, name


def test_one_voice_is_not_taken_for_another(judge):
    heard = [judge.listen(REFERENCES[voice], recording(voice), RATE, "stop") for voice in VOICES]
    assert summary(heard, VOICES)["voice_right"] == 1
    assert summary(heard, [*VOICES[1:], VOICES[0]])["voice_right"] == 0
    assert summary(heard, [None] * 3)["voice_right"] is None


def test_the_shipped_speaker_model_states_its_error():
    model = SpeakerModel.load(ROOT / "benchmark" / "speakers.npz")
    assert model.voices == ["awb", "kal", "rms", "slt"]
    assert model.error <= 0.01 and model.tested >= 400


def test_a_speaker_model_learns_what_it_is_given(tmp_path):
    rng = np.random.default_rng(0)

    def tones(hertz: float) -> list[np.ndarray]:
        time = np.arange(RATE) / RATE
        return [
            sum(np.sin(2 * np.pi * k * hertz * time + rng.uniform(0, 6)) / k for k in range(1, 20)).astype(np.float32)
            for hertz in hertz * rng.uniform(0.95, 1.05, 50)
        ]

    model = train_speaker_model({"low": tones(90), "high": tones(210)}, {"low": tones(90), "high": tones(210)})
    assert (model.error, model.tested) == (0, 100)
    model.save(tmp_path / "model.npz")
    assert [SpeakerModel.load(tmp_path / "model.npz").recognize(tones(x)[0]) for x in (90, 210)] == ["low", "high"]
    swapped = train_speaker_model({"low": tones(90), "high": tones(210)}, {"low": tones(210), "high": tones(90)})
    assert swapped.error == 1


def test_free_english_is_recognized_without_the_grammar():
    """A matrix sentence is no free one, but its words are English; the model of English mishears some of flite's."""
    sentence = f"{REFERENCES['slt']},"
    right, of = Recognizer().words_right(sentence, recording("slt"))
    assert of == 5 and right >= 3
    assert Recognizer().words_right(sentence, recording("slt", "prompt"))[0] <= 1


def test_utterances_are_unseen_all_different_and_the_same_each_time():
    utterances = make_utterances(60, 3)
    assert utterances == make_utterances(60, 3) != make_utterances(60, 4)
    assert len({u.sentence for u in utterances}) == 60 and all(is_held_out(u.sentence) for u in utterances)
    assert not any({"got", "bought"} & set(u.sentence.split()) for u in utterances)
    assert {(u.mode, u.voice) for u in utterances} == {
        (mode, None if mode == "zero-shot" else voice) for mode in MATRIX_MODES for voice in VOICES
    }
    continuation = next(u for u in utterances if u.mode == "continuation").fields()
    assert continuation["text"].startswith(" ") and continuation["prompt_audio"].startswith(b"fLaC")


def test_words_and_samples_are_compared_place_by_place():
    assert in_place("peter got three large desks".split(), "peter got nine large desks".split()) == 4
    assert in_place("peter got three large desks".split(), []) == 0
    assert errors("the cat sat".split(), "the cat sat".split()) == 0
    assert errors("the cat sat".split(), "a cat sat down".split()) == 2
    assert errors("the cat sat".split(), []) == errors([], "the cat sat".split()) == 3
    assert difference(np.zeros(3), np.array([0, 0.5, 0])) == 0.5
    assert difference(np.zeros(3), np.zeros(4)) == float("inf")


def test_the_picture_shows_each_mode_over_the_load(tmp_path, monkeypatch):
    drawn, real = [], quality_plot.plt.Axes.plot

    def noting(axes, x, y, **options):
        drawn.append((options["label"], list(x), list(y)))
        return real(axes, x, y, **options)

    monkeypatch.setattr(quality_plot.plt.Axes, "plot", noting)
    right = {"words_right": 0.75, "voice_right": None, "stopped_in_time": 1.0}
    rows = [{"streams": streams, "modes": {"control": right, "reference": right}} for streams in (1, 32)]
    quality_plot.plot(rows, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    modes = ("control", "reference")  # and nothing where a figure is of no sense in a mode
    assert drawn == [(m, [1, 32], [value, value]) for value in (75, 100) for m in modes]
