"""Fixtures that several folders share."""

import pytest
from triton_server import ROOT, TritonServer


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch  # not for the tests that need no torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def server():
    """A real tritonserver with the small model, shared by all tests that do not stop or overload it."""
    with TritonServer(model=ROOT / "models" / "small") as server:
        yield server
