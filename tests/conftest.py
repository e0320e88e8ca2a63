"""Fixtures that several folders share."""

import pytest
from triton_server import ROOT, TritonServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The one file that takes as long as all the others goes first, for two processes to end at about the same time."""
    items.sort(key=lambda item: item.path.name != "test_quality_full.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch  # not for the tests that need no torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A real tritonserver with the small model, shared by all tests that do not stop or overload it."""
    environment = {"DQ_ENGINE_VOICES_DIR": str(tmp_path_factory.mktemp("voices"))}
    with TritonServer(model=ROOT / "models" / "small", environment=environment) as server:
        yield server
