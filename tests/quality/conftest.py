"""The measure of quality lies in benchmark/."""

import sys

import pytest
from triton_server import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

from judge import Judge  # noqa: E402
from speaker import SpeakerModel  # noqa: E402


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge(SpeakerModel.load(ROOT / "benchmark" / "speakers.npz"))
