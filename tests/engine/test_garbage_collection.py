"""A full garbage collection in a process with an engine: short, since every stream waits for it."""

import gc

from dq_engine.engine import DqCoreEngine, EngineConfig, Request


def test_it_does_not_go_through_the_engine():
    with DqCoreEngine(EngineConfig(model="models/small", max_num_seqs=2)) as engine:
        for _ in engine.submit(Request(text="lucy sees nine toys", max_generate_length=4)):
            pass
        while_running = len(gc.get_objects())
    assert while_running < 10_000, "looked at by each full collection, some 0.5 ms a thousand"
    assert len(gc.get_objects()) > 100_000, "still left alone after the engine's end"
