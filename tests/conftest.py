"""Fixtures that several folders share."""

import pytest
from triton_server import ROOT, TritonServer


@pytest.fixture(scope="session")
def server():
    """A real tritonserver with the small model, shared by all tests that do not stop or overload it."""
    with TritonServer(model=ROOT / "models" / "small") as server:
        yield server
