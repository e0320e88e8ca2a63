"""A model that needs no engine, for the tests of the server's launcher: sends n numbers, one every 50 ms."""

from pathlib import Path

CONFIG = """
name: "counter"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""

MODEL = """
import os
import subprocess
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        if reason := os.environ.get("COUNTER_FAILS"):
            raise pb_utils.TritonModelException(reason)
        # A worker of its own, as the engine's; it does not watch its parent.
        self.worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("counter:", sys.executable, np.__version__, os.environ.get("DQ_ENGINE_MODEL"), flush=True)

    def execute(self, requests):
        for request in requests:
            n = pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0]
            threading.Thread(target=self.count, args=(request.get_response_sender(), n), daemon=True).start()

    def count(self, sender, n):
        for i in range(n):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([i], np.int32))]))
            time.sleep(0.05)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.worker.kill()
        self.worker.wait()
"""


def write(repository: Path) -> Path:
    """Make a model repository that holds the model `counter`; returns it."""
    folder = repository / "counter" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    (folder / "model.py").write_text(MODEL)
    return repository
