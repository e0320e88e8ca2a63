"""tools/train_small: what it trains on, and that its stages run, go on after an interruption, and give a checkpoint."""

import json
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from train_small.audio_losses import ReconstructionLoss, downsample, low_pass, mel_filters, upsample
from train_small.batches import Encoded, Layout
from train_small.checkpoint import make_model, model_config, write_config
from train_small.corpus import Corpus, load_corpus, plan
from train_small.crops import FRAME, LEAD, MARGIN, Crops
from train_small.models import ModelSettings, train_adapter, train_models
from train_small.objective import losses
from train_small.sentences import free_sentence, is_held_out, is_matrix, matrix_sentence
from train_small.tokenizer import AUDIO_END, AUDIO_START, REFERENCE_END, REFERENCE_START, tokens
from train_small.trainer import Budget, Kind, Trainer, make_optimizer
from train_small.vae import CONFIG, VaeSettings, load_vae, train_decoder, train_vae
from transformers import LlamaTokenizerFast
from triton_server import ROOT
from utterances import PROMPTS, RECORDINGS, REFERENCES, VOICES

SMALL = ROOT / "models" / "small"
CPU = torch.device("cpu")


def test_sentences_are_seeded_and_the_held_out_never_trained_on():
    rng = random.Random(0)
    trained, tested = ([matrix_sentence(rng, held_out) for _ in range(300)] for held_out in (False, True))
    assert all(map(is_matrix, trained + tested)) and not set(trained) & set(tested)
    assert not any(map(is_held_out, trained)) and all(map(is_held_out, tested))
    items = plan(30, 30, 7, False)
    assert items == plan(30, 30, 7, False) != plan(30, 30, 8, False)
    assert sum(is_matrix(text) for text, _ in items) == 30
    free = [free_sentence(rng, held_out=False) for _ in range(2000)]
    assert not any(map(is_held_out, free)) and is_held_out(free_sentence(rng, held_out=True))
    assert len(set(free)) > 1500 and not any(map(is_matrix, free))
    assert all("{" not in text and text.isascii() and len(text) < 130 for text in free)


def test_the_shipped_checkpoint_is_what_the_stages_write(tmp_path):
    write_config(tmp_path, CONFIG)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((SMALL / "config.json").read_text())
    assert model_config(CONFIG)["lm_config"]["hidden_size"] == 256
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((SMALL / name).read_text())
    tokenizer = LlamaTokenizerFast.from_pretrained(SMALL)
    for text in ("peter got three", "(slt)It's, well... 10%?", "Zoë 你好", "a  b"):
        assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == tokens(text)


def test_what_ships_is_small():
    assert sum(path.stat().st_size for path in SMALL.parent.rglob("*") if path.is_file()) <= 24e6


def test_resampling_keeps_what_both_rates_can_hold():
    taps = low_pass(CPU)
    time = torch.arange(3200) / 16000
    x = torch.sin(2 * torch.pi * 1000 * time)[None, None]
    y = upsample(x, taps)
    expected = torch.sin(2 * torch.pi * 1000 * torch.arange(9600) / 48000)
    assert (y[0, 0, 300:-300] - expected[300:-300]).abs().max() < 2e-3
    assert (downsample(y, taps)[0, 0, 100:-100] - x[0, 0, 100:-100]).abs().max() < 4e-3


def test_the_loss_is_zero_for_the_same_and_grows_with_noise():
    assert mel_filters(128, 16).sum(1) == pytest.approx(1)
    loss, x = ReconstructionLoss(), torch.randn(1, 1, 9600, generator=torch.Generator().manual_seed(0))
    values = [loss(x + amount * torch.flip(x, [-1]), x)["loss"].item() for amount in (0.0, 0.01, 0.1)]
    assert values[0] < 1e-3 < values[1] < values[2]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The recordings of the measure: of each voice two sentences, and both in a row."""
    items, waves = [], []
    for voice in VOICES:
        own = [
            soundfile.read(RECORDINGS / f"{voice}_{kind}.flac", dtype="int16")[0] for kind in ("reference", "prompt")
        ]
        texts = [REFERENCES[voice], PROMPTS[voice]]
        items += [(text, voice) for text in (*texts, " ".join(texts))]
        waves += [*own, np.concatenate(own)]
    return Corpus(items, np.concatenate(waves), np.cumsum([0, *map(len, waves)]))


@pytest.fixture(scope="module")
def encoded(corpus) -> Encoded:
    return Encoded(corpus, load_vae(SMALL, CPU), VOICES, pairs=4, device=CPU, seed=0)


def test_a_batch_is_laid_out_as_the_official_model_reads_it(encoded, corpus):
    torch.manual_seed(0)
    batch = encoded.batch(Layout(16, 18, 46, reference=20))
    for row in range(16):
        ids = batch["tokens"][row].tolist()
        assert ids[0] == REFERENCE_START
        references = ids.index(REFERENCE_END) - 1
        begin, end = ids.index(AUDIO_START), ids.index(AUDIO_END)
        text = ids[references + 2 : begin]
        assert text in [tokens(form) for t, _ in corpus.items for form in (t, t[0].upper() + t[1:] + ".")]
        patches = end - begin - 1
        mask = batch["text_mask"][row]
        assert mask.sum() == 4 + len(text) and mask[begin] == mask[end] == 1 and mask[1 : references + 1].sum() == 0
        assert batch["audio_at"][row, :references].tolist() == list(range(1, references + 1))
        assert batch["audio_at"][row, 20 : 20 + patches].tolist() == list(range(begin + 1, end))
        assert batch["audio_mask"][row].sum() == references + patches
        assert batch["learned"][row].tolist() == [1] * patches + [0] * (18 - patches)
        assert batch["stops"][row].nonzero().tolist() == [[patches - 1]]
        assert (batch["latents"][row].abs().sum((1, 2)) > 0).tolist() == (batch["audio_mask"][row] > 0).tolist()


def test_of_a_continuation_only_what_follows_the_prompt_is_learned(encoded):
    torch.manual_seed(0)
    batch = encoded.batch(Layout(8, 36, 92, pairs=True))
    learned, mask = batch["learned"], batch["audio_mask"]
    assert (learned.sum(1) > 0).all() and (learned.sum(1) < mask.sum(1)).all()
    last = (mask.sum(1) - 1).long()
    assert (learned[torch.arange(8), last] == 1).all() and (batch["stops"][torch.arange(8), last] == 1).all()
    assert (learned[:, 0] == 0).all()


def test_the_shipped_model_does_well_at_the_objective(encoded):
    """Untrained, the flow's loss is 2 and the stops' 0.7."""
    model = make_model(SMALL, load_vae(SMALL, CPU), CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        _, flow, stop = losses(model, encoded.batch(Layout(8, 18, 46)))
    assert 0.1 < flow < 0.8 and stop < 0.1


def test_a_trainer_goes_on_where_it_was_saved(tmp_path):
    def train(folder: Path, steps: int) -> tuple[Trainer, torch.nn.Linear]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        parameters = list(model.parameters())
        optimizer = make_optimizer(parameters, (0.9, 0.99), 0.0)
        trainer = Trainer("line", folder, model, parameters, [(optimizer, 0.1)], ["loss"], seed=0)

        def step(batch: dict) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()[None]

        trainer.run({"only": Kind(1, lambda: {"x": torch.randn(64, 4)}, step)}, Budget(5, steps), warm_up=10)
        return trainer, model

    whole, model = train(tmp_path / "whole", 300)
    assert whole.step == 300 and whole.curve[-1][2] < 1e-2
    assert torch.allclose(model.weight, torch.ones(1, 4), atol=0.1)
    train(tmp_path / "parts", 100)
    again, _ = train(tmp_path / "parts", 300)
    assert again.step == 300 and [row[0] for row in again.curve] == [100, 200, 300]
    again.take_average()
    assert not (tmp_path / "parts" / "line.state.part").exists()
    curve = json.loads((tmp_path / "parts" / "line.curve.json").read_text())
    assert curve["columns"] == ["step", "seconds", "loss"] and curve["rows"][-1][0] == 300


def write(corpus: Corpus, folder: Path) -> Path:
    """As the data stage does."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(corpus.items))
    np.savez(folder / "shard_000.npz", audio=corpus.audio, offsets=corpus.offsets)
    return folder


def test_crops_begin_where_sentences_do_or_have_the_frames_before_them(corpus, tmp_path):
    torch.manual_seed(0)
    audio = corpus.audio.astype(np.float32) / 32768
    crops = Crops(write(corpus, tmp_path / "corpus"), 16, 10, CPU)
    begins, middles = (batch["audio"][:, 0].numpy() for batch in (crops.begins(), crops.middles()))
    assert begins.shape == (16, 10 * FRAME + 2 * MARGIN) and middles.shape == (16, (LEAD + 10) * FRAME + 2 * MARGIN)
    sentences = [max(0, offset - MARGIN) for offset in corpus.offsets[:-1]]
    for row in begins:
        assert any(np.array_equal(row, audio[begin : begin + len(row)]) for begin in sentences)
    assert not any(np.array_equal(row[: begins.shape[1]], begin) for row in middles for begin in begins)


def test_the_vaes_stage_goes_on_from_the_checkpoints(corpus, tmp_path):
    """At a rate of next to nothing a step leaves the shipped one's latents as they are, up to their scale."""
    (tmp_path / "audiovae.pth").write_bytes((SMALL / "audiovae.pth").read_bytes())
    settings = VaeSettings(batch=1, frames=8, rate=1e-6)
    train_vae(tmp_path, write(corpus, tmp_path / "corpus"), tmp_path / "out", Budget(1, 1), settings, CPU, 0)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((SMALL / "config.json").read_text())
    sound = torch.from_numpy(corpus.audio[None, None, : 60 * FRAME]).float() / 32768
    with torch.no_grad():
        shipped, trained = (load_vae(folder, CPU).encode(sound, 16000)[0] for folder in (SMALL, tmp_path))
    for ours, theirs in zip(trained, shipped, strict=True):
        assert torch.corrcoef(torch.stack([ours, theirs]))[0, 1] > 0.999
    assert trained.mean(1).abs().max() < 1 and trained.std(1).min() > 0.3


@pytest.mark.parametrize("adversaries", [False, True])
def test_the_decoders_stage_leaves_the_latents_alone(corpus, tmp_path, adversaries):
    settings = VaeSettings(batch=1, frames=8, rate=1e-3, adversaries=adversaries)
    vae, before = (load_vae(SMALL, CPU) for _ in range(2))
    folder = write(corpus, tmp_path / "corpus")
    train_decoder(vae, folder, tmp_path / "out", Budget(1, 2), settings, CPU, 0)
    after = vae.state_dict()
    changed = {name.split(".")[0] for name, tensor in before.state_dict().items() if (tensor != after[name]).any()}
    assert changed == {"decoder"}
    curve = json.loads((tmp_path / "out" / "decoder.curve.json").read_text())
    assert ("discriminators" in curve["columns"]) == adversaries and np.isfinite(curve["rows"]).all()


def test_the_decoders_stage_ends_with_one_that_hardly_clicks(corpus, tmp_path):
    vae = load_vae(SMALL, CPU)
    last, seen = vae.decoder.model[-2], {}
    handle = last.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0]))

    @torch.no_grad()
    def onset() -> float:
        return vae.decode(vae.encode(torch.zeros(1, 1, 4 * FRAME), 16000))[0, 0, :480].abs().max().item()

    onset()
    with torch.no_grad():  # in silence what is before it still adds up to nothing, at the beginning it does not
        weight = last.weight.clone()
        weight[0, 0, 0] += 0.4
        last.weight_v.copy_(weight)
        last.weight_g.copy_(weight.norm().view_as(last.weight_g))
        last.bias -= 0.4 * seen["x"][0, 0, -1]
    clicking = onset()
    assert clicking > 0.1
    settings = VaeSettings(batch=1, frames=8, rate=1e-6, adversaries=False)
    train_decoder(vae, write(corpus, tmp_path / "corpus"), tmp_path / "out", Budget(1, 1), settings, CPU, 0)
    handle.remove()
    assert onset() < clicking / 2


def test_an_adapter_is_trained_on_a_voice_that_the_models_do_not_know(corpus, tmp_path):
    folder = write(Corpus([(text, "kal") for text, _ in corpus.items], corpus.audio, corpus.offsets), tmp_path / "c")
    train_adapter(SMALL, folder, tmp_path / "out", Budget(1, 2), ModelSettings(8, 1e-3, 0), CPU, 0)
    weights = load_file(tmp_path / "out" / "lora" / "lora_weights.safetensors")
    shipped = load_file(ROOT / "models/adapters/kal/lora_weights.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in shipped.items()}
    moved = [name for name, tensor in weights.items() if name.endswith("lora_B") and tensor.any()]
    assert moved and len(moved) == sum(name.endswith("lora_B") for name in weights)


def test_models_are_trained_from_a_checkpoint_into_the_same_files(corpus, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for file in SMALL.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    folder = write(corpus, tmp_path / "corpus")
    (folder / "shard_000.npz").rename(tmp_path / "shard_000.npz")
    with pytest.raises(ValueError, match="not complete"):
        train_models(checkpoint, folder, tmp_path / "out", Budget(1, 2), ModelSettings(8, 1e-4, 4), CPU, 0)
    (tmp_path / "shard_000.npz").rename(folder / "shard_000.npz")
    assert load_corpus(folder)[1]
    train_models(checkpoint, folder, tmp_path / "out", Budget(1, 2), ModelSettings(8, 1e-4, 4), CPU, 0)
    before, after = load_file(SMALL / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vae /nowhere {tmp}/checkpoint --out {tmp}", "error: /nowhere/plan.json: No such file or directory"),
        ("decoder /nowhere {tmp}/checkpoint --out {tmp}", "error: {tmp}/checkpoint/config.json: No such file or"),
        ("data {tmp} --voice slt --voice foo", "--voice: 'foo' is not one of slt, rms, awb, kal"),
        ("curves {tmp} {tmp}/curves.png", "has no curve of a stage"),
    ],
)
def test_what_is_not_there_is_named(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["train_small", *command.format(tmp=tmp_path).split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("train_small", run_name="__main__")
    assert message.format(tmp=tmp_path) in f"{ended.value.code} {capsys.readouterr().err}"
