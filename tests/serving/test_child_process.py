"""What a process of ours imports."""

import sys

from collector import TEXT, Collector, config

from dq_engine.request import Request
from dq_engine.serving.messages import Finished
from dq_engine.serving.supervisor import Supervisor


def test_a_worker_imports_nothing_from_the_current_directory(tmp_path, monkeypatch):
    for name in {*sys.stdlib_module_names, "dq_engine", "zmq", "numpy", "torch", "nanovllm_voxcpm", "av"}:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')")
    monkeypatch.chdir(tmp_path)
    supervisor = Supervisor([config()])
    supervisor.start()
    try:
        ((_, last),) = Collector(supervisor, Request(text=TEXT, max_generate_length=1), stream=False).rest()
        assert isinstance(last, Finished)
    finally:
        supervisor.stop()
