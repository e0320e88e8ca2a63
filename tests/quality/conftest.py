"""The measure of quality lies in benchmark/."""

import sys

import pytest
from triton_server import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

# torch's optimizers bring in torch._dynamo, which takes the folder tests/server for the package of that name.
_path = sys.path.copy()
sys.path[:] = [entry for entry in _path if entry != str(ROOT / "tests")]
import torch._dynamo  # noqa: E402, F401

sys.path[:] = _path

from judge import Judge  # noqa: E402
from speaker import SpeakerModel  # noqa: E402


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge(SpeakerModel.load(ROOT / "benchmark" / "speakers.npz"))
