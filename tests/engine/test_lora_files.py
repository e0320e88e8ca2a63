"""Adapters that do not fit the model, and files that want to do harm: refused, with what is wrong in the message."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.adapters import ATTENTION, AdapterShape, adapter_sizes, random_weights, write_adapter
from reference.checkpoints import SHAPES
from reference.listening import hear
from safetensors.torch import load_file, save_file

from dq_engine.engine import DqCoreEngine, Request, RequestError

SHAPE = SHAPES[0]
ADAPTER = AdapterShape(seed=0, rank=4)
Q = "base_lm.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def weights(checkpoint) -> dict[str, torch.Tensor]:
    return random_weights(adapter_sizes(checkpoint(SHAPE)[0], ADAPTER), ADAPTER)


@pytest.fixture(scope="module")
def engine(open_case, tmp_path_factory) -> DqCoreEngine:
    folder = tmp_path_factory.mktemp("adapters")
    return open_case(SHAPE, lora_max_loras=1, lora_max_rank=8, lora_dir=str(folder)).engine


@pytest.fixture
def adapter(engine, weights) -> Path:
    """A good one, to be spoiled."""
    path = write_adapter(Path(engine.config.lora_dir) / "adapter", weights, ADAPTER)
    yield path
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def refusal(engine: DqCoreEngine, path: str = "adapter") -> str:
    with pytest.raises(RequestError) as caught:
        engine.register_lora("x", path)
    assert engine.list_loras() == []
    return str(caught.value)


def spoil(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change its tensors."""
    file = adapter / "lora_weights.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def configure(adapter: Path, **fields) -> None:
    file = adapter / "lora_config.json"
    config = json.loads(file.read_text())
    config["lora_config"] |= fields
    file.write_text(json.dumps(config))


def test_the_good_one_speaks(engine, adapter):
    info = engine.register_lora("x", "adapter")
    size = engine._adapters._layers.slot_bytes
    shown = {"name": "x", "rank": 4, "alpha": 16.0, "bytes": size, "state": "registered", "streams": 0}
    assert shown.items() <= info.items()
    shutil.rmtree(adapter)  # it is in memory
    assert hear(engine.submit(Request(text="oh", lora="x", max_generate_length=3))).stats["patches"] == 3
    engine.unregister_lora("x")
    adapter.mkdir()


def test_files_that_are_not_the_expected_ones(engine, adapter):
    info = engine.register_lora("x", "adapter")
    assert engine.register_lora("x", "adapter", info["digest"])["version"] == 2
    message = '^INVALID_ARG: path: "adapter" has been changed since it was registered$'
    configure(adapter, alpha=3)
    with pytest.raises(RequestError, match=message):
        engine.register_lora("x", "adapter", info["digest"])
    configure(adapter, alpha=16)
    spoil(adapter, lambda state: state.update({name: tensor * 2 for name, tensor in state.items()}))
    with pytest.raises(RequestError, match=message):
        engine.register_lora("x", "adapter", info["digest"])
    assert [entry["digest"] for entry in engine.list_loras()] == [info["digest"]]
    engine.unregister_lora("x")


@pytest.mark.parametrize("prefix", ["model.", "base_model.model.", "module."])
@pytest.mark.parametrize("form", ["folder", "absolute", "safetensors", "ckpt", "ckpt in a folder"])
def test_every_form(engine, adapter, weights, form, prefix):
    state = {prefix + name: tensor for name, tensor in weights.items()}
    spoil(adapter, lambda tensors: (tensors.clear(), tensors.update(state)))
    path = {"absolute": str(adapter), "safetensors": "adapter/lora_weights.safetensors", "ckpt": "adapter/w.ckpt"}
    if form.startswith("ckpt"):
        (adapter / "lora_weights.safetensors").unlink()
        name = "w.ckpt" if form == "ckpt" else "lora_weights.ckpt"
        torch.save({"state_dict": state} if prefix == "model." else state, adapter / name)
    assert engine.register_lora("x", path.get(form, "adapter"))["rank"] == 4
    engine.unregister_lora("x")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(engine, adapter, dtype):
    spoil(adapter, lambda state: state.update({name: t.to(dtype) for name, t in state.items()}))
    assert engine.register_lora("x", "adapter")["rank"] == 4
    engine.unregister_lora("x")


def remove(name):
    return lambda state: state.pop(name)


def put(name, tensor):
    return lambda state: state.update({name: tensor})


def poison(name, value):
    return lambda state: state[name].view(-1)[3].fill_(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(f"{Q}.lora_A"), f'"{Q}" has only one of lora_A and lora_B'),
        (remove(f"{Q}.lora_B"), f'"{Q}" has only one of lora_A and lora_B'),
        (lambda state: state.clear(), "holds no adapter"),
        (put(f"{Q}.lora_A", torch.zeros(4, 65)), f'"{Q}.lora_A" has shape [4, 65], of this model it is [4, 64]'),
        (put(f"{Q}.lora_B", torch.zeros(63, 4)), f'"{Q}.lora_B" has shape [63, 4], of this model it is [64, 4]'),
        (put(f"{Q}.lora_A", torch.zeros(3, 64)), f'"{Q}.lora_A" has shape [3, 64], of this model it is [4, 64]'),
        (put(f"{Q}.lora_A", torch.zeros(256)), f'"{Q}.lora_A" has shape [256], of this model it is [4, 64]'),
        (poison(f"{Q}.lora_A", float("nan")), f'"{Q}.lora_A" has values that are not finite'),
        (poison(f"{Q}.lora_B", float("-inf")), f'"{Q}.lora_B" has values that are not finite'),
        (poison(f"{Q}.lora_B", 3e38), f'"{Q}.lora_B" has values that are not finite'),  # times alpha / r
        (put(f"{Q}.lora_A", torch.zeros(4, 64, dtype=torch.int64)), "no tensor of float32, float16 or bfloat16"),
        (put(f"{Q}.lora_A", torch.zeros(4, 64, dtype=torch.float64)), "no tensor of float32, float16 or bfloat16"),
        (put(f"{Q}.weight", torch.zeros(4, 64)), f'"{Q}.weight" is neither a .lora_A nor a .lora_B'),
        (put(f"{Q}.lora_A.weight", torch.zeros(4, 64)), f'"{Q}.lora_A.weight" is neither a .lora_A nor a .lora_B'),
        (put(f"model.{Q}.lora_A", torch.zeros(4, 64)), f'there are two tensors for "{Q}.lora_A"'),
        (
            put("base_lm.layers.9.self_attn.q_proj.lora_A", torch.zeros(4, 64)),
            '"base_lm.layers.9.self_attn.q_proj.lora_A" is for no layer that takes adapters',
        ),
        (
            put("base_lm.layers.0.mlp.up_proj.lora_A", torch.zeros(4, 64)),
            '"base_lm.layers.0.mlp.up_proj.lora_A" is for no layer that takes adapters',
        ),
        (put("stop_head.lora_A", torch.zeros(4, 64)), '"stop_head.lora_A" is for no layer that takes adapters'),
        (put("lora_A", torch.zeros(4, 64)), '"lora_A" is for no layer that takes adapters'),
    ],
)
def test_tensors_that_do_not_fit(engine, adapter, change, message):
    spoil(adapter, change)
    refused = refusal(engine)
    assert refused.startswith('INVALID_ARG: path: "adapter/lora_weights.safetensors"') and message in refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 9}, "has rank 9, the limit is 8 (lora_max_rank)"),
        ({"r": 2**70}, "has rank 1180591620717411303424, the limit is 8"),
        ({"r": 5}, "has shape [4, 64], of this model it is [5, 64]"),
        ({"r": 0}, "lora_config.r must be a positive integer, got 0"),
        ({"r": "4"}, "lora_config.r must be a positive integer, got '4'"),
        ({"r": True}, "lora_config.r must be a positive integer, got True"),
        ({"alpha": 0}, "lora_config.alpha must be a positive number up to 1e+06, got 0"),
        ({"alpha": -1.5}, "lora_config.alpha must be a positive number up to 1e+06, got -1.5"),
        ({"alpha": float("nan")}, "lora_config.alpha must be a positive number up to 1e+06, got nan"),
        ({"alpha": float("inf")}, "lora_config.alpha must be a positive number up to 1e+06, got inf"),
        ({"alpha": None}, "lora_config.alpha must be a positive number up to 1e+06, got None"),
        ({"alpha": [16]}, "lora_config.alpha must be a positive number up to 1e+06, got [16]"),
        ({"alpha": 10**400}, "lora_config.alpha must be a positive number"),
    ],
)
def test_configurations_that_do_not_fit(engine, adapter, fields, message):
    configure(adapter, **fields)
    refused = refusal(engine)
    assert refused.startswith("INVALID_ARG: path: ") and message in refused


def test_the_rank_may_come_from_the_tensors(engine, adapter, checkpoint):
    configure(adapter, r=None)
    assert engine.register_lora("x", "adapter")["rank"] == 4
    engine.unregister_lora("x")
    shape = AdapterShape(seed=0, rank=9, lm=ATTENTION, dit=(), between=())
    save_file(random_weights(adapter_sizes(checkpoint(SHAPE)[0], shape), shape), adapter / "lora_weights.safetensors")
    assert "has rank 9, the limit is 8 (lora_max_rank)" in refusal(engine)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"lora_config": 3}', '{"lora_config": {}}', "[" * 100_000, "\ud800"]
)
def test_configurations_that_are_none(engine, adapter, text):
    (adapter / "lora_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refusal(engine).startswith('INVALID_ARG: path: "adapter/lora_config.json"')


def test_files_that_are_missing_or_too_large(engine, adapter, weights):
    folder = Path(engine.config.lora_dir)
    assert refusal(engine, "nobody") == 'NOT_FOUND: path: there is no file "nobody/lora_config.json"'
    (adapter / "lora_weights.safetensors").unlink()
    assert refusal(engine) == 'NOT_FOUND: path: there is no file "adapter/lora_weights.safetensors"'
    with (adapter / "lora_weights.safetensors").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    assert "has 1099511627776 bytes, the limit is" in refusal(engine)
    with (adapter / "lora_config.json").open("ab") as file:
        file.truncate(2**21)
    assert 'lora_config.json" has 2097152 bytes, the limit is 1048576' in refusal(engine)
    assert folder.is_dir()


OUTSIDE = ["../adapters2", "a/../../b", "/etc", "/etc/x.ckpt", "", ".", "..", "a\0b"]


@pytest.mark.parametrize("path", [*OUTSIDE, "x" * 5000, "a/" * 3000])
def test_paths_that_leave_the_folder_or_cannot_be(engine, path):
    assert refusal(engine, path).startswith(("INVALID_ARG: path: ", "NOT_FOUND: path: "))


@pytest.mark.parametrize("what", ["lora_weights.safetensors", "lora_config.json", "adapter"])
def test_symbolic_links(engine, adapter, tmp_path, what):
    """Each leads to a good file."""
    place = adapter if what == "adapter" else adapter / what
    shutil.move(place, tmp_path / what)
    place.symlink_to(tmp_path / what)
    assert "leads through a symbolic link" in refusal(engine)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("/tmp/harm-was-done-by-an-adapter",)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def recompressed(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return buffer.getvalue()


def huge() -> bytes:
    """A tensor of 4 TB in a few bytes."""
    return saved({f"{Q}.lora_A": torch.zeros(1).expand(2**20, 2**20), f"{Q}.lora_B": torch.zeros(64, 4)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a file of torch.save"),
        (b"PK\x05\x06" + bytes(18), "is damaged, or holds more than tensors"),
        (pickle.dumps({"a": 1}), "is not a file of torch.save"),
        (pickle.dumps(Harm()), "is not a file of torch.save"),
        (saved(Harm()), "is damaged, or holds more than tensors"),
        (saved({"state_dict": Harm()}), "is damaged, or holds more than tensors"),
        (saved({"state_dict": {f"{Q}.lora_A": [1, 2]}}), "no tensor of float32, float16 or bfloat16"),
        (saved({"\ud800.lora_A": torch.zeros(3)}), '"\\ud800.lora_A" is for no layer that takes adapters'),
        (saved([torch.zeros(3)]), "must hold tensors by name"),
        (saved({3: torch.zeros(3)}), "must hold tensors by name"),
        (saved({f"{Q}.lora_A": torch.zeros(4, 64).to_sparse()}), "no tensor of float32, float16 or bfloat16"),
        (saved({f"{Q}.lora_A": torch.zeros(4, 64)})[:-300], "is not a file of torch.save"),
        (recompressed(saved({f"{Q}.lora_A": torch.zeros(4, 64)})), "is compressed"),
        (huge(), "has shape [1048576, 1048576]"),
    ],
)
def test_pickles(engine, adapter, data, message):
    (adapter / "lora_weights.safetensors").unlink()
    (adapter / "lora_weights.ckpt").write_bytes(data)
    assert message in refusal(engine)
    assert not Path("/tmp/harm-was-done-by-an-adapter").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", bytes(100)],
)
def test_damaged_safetensors(engine, adapter, data):
    (adapter / "lora_weights.safetensors").write_bytes(data)
    refused = refusal(engine)
    assert refused.startswith('INVALID_ARG: path: "adapter/lora_weights.safetensors"'), refused


def test_nobody_was_harmed(engine, adapter):
    """After all that the engine still serves."""
    engine.register_lora("x", "adapter")
    assert hear(engine.submit(Request(text="oh", lora="x", max_generate_length=3))).stats["patches"] == 3
    engine.unregister_lora("x")
