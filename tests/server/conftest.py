"""A server of few slots, with a config.pbtxt of few lines."""

from collections.abc import Iterator

import pytest
from repositories import MINIMAL, write_repository
from talk import LABELS, metrics, wait_until
from triton_server import ROOT, TritonServer


@pytest.fixture
def tight_server(shared_tight_server: TritonServer) -> TritonServer:
    """It speaks to two at a time, and two may wait; what its config.pbtxt leaves out is completed by the model.

    Nobody uses it when a test begins.
    """
    busy = [f"voxcpm2_{state}_streams{LABELS}" for state in ("active", "queued")]
    wait_until(lambda: not any(metrics(shared_tight_server)[name] for name in busy), 60, "nobody speaks")
    return shared_tight_server


@pytest.fixture(scope="session")
def shared_tight_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = write_repository(tmp_path_factory.mktemp("tight") / "models", MINIMAL)
    settings = {"DQ_ENGINE_MAX_NUM_SEQS": "2", "DQ_ENGINE_QUEUE_SIZE": "2", "DQ_ENGINE_THREADS": "1"}
    settings["DQ_ENGINE_REALTIME"] = "0"  # who gets a slot does not depend on how busy the machine is
    with TritonServer(
        model=ROOT / "models" / "small", model_repository=repository, environment=settings, model_control=True
    ) as server:
        wait_until(lambda: metrics(server)[f"voxcpm2_patches_total{LABELS}"] == 1, 5, "the warm-up's patch is counted")
        yield server
