"""Random checkpoints of several shapes, the official model of each, and engines on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from reference.checkpoints import SHAPES, Shape, make_checkpoint
from reference.official import Official
from reference.recordings import write_voice

from dq_engine.engine import DqCoreEngine, EngineConfig


@dataclass(frozen=True)
class Case:
    """A checkpoint, and who speaks with it."""

    shape: Shape
    path: Path
    official: Official
    engine: DqCoreEngine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], tuple[Path, Official]]:
    """Makes a checkpoint of a shape, once; its directory and its official model."""
    made: dict[str, tuple[Path, Official]] = {}

    def make(shape: Shape) -> tuple[Path, Official]:
        if shape.name not in made:
            path = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / shape.name, shape)
            made[shape.name] = path, Official(path)
        return made[shape.name]

    return make


@pytest.fixture(scope="module")
def open_case(checkpoint) -> Iterator[Callable[..., Case]]:
    """Starts an engine on a checkpoint of a shape, with settings; it is stopped after the module's tests."""
    cases: list[Case] = []

    def open(shape: Shape, **settings) -> Case:
        path, official = checkpoint(shape)
        engine = DqCoreEngine(EngineConfig(model=str(path), device="cpu", threads=1, **settings))
        cases.append(Case(shape, path, official, engine.start()))
        return cases[-1]

    yield open
    for case in cases:
        case.engine.stop()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def case(request: pytest.FixtureRequest, open_case) -> Case:
    """Each of the shapes in turn."""
    return open_case(request.param)


@pytest.fixture(scope="session")
def reference_wav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.33 s, stereo, at a rate that has to be converted; no multiple of a patch."""
    path = tmp_path_factory.mktemp("recordings") / "reference.wav"
    return write_voice(path, seconds=0.33, rate=44_100, channels=2, pitch=110, seed=1)


@pytest.fixture(scope="session")
def prompt_wav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.217 s at the model's rate; no multiple of a patch."""
    path = tmp_path_factory.mktemp("recordings") / "prompt.wav"
    return write_voice(path, seconds=0.217, rate=16_000, pitch=190, seed=2)
