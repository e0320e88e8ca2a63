"""A process of a tensor-parallel engine that only runs along.

    python -m dq_engine.parallel.follower

Standard input: a line of JSON (config, path, rank), then messages. Its end means that the engine is gone, however it
ended, and this process ends at once.
"""

import gc
import json
import logging
import os
import queue
import signal
import threading
from pathlib import Path
from typing import BinaryIO, NoReturn

from dq_engine.config import EngineConfig
from dq_engine.loading import load
from dq_engine.logs import configure
from dq_engine.parallel.group import Rank
from dq_engine.parallel.messages import Message, Start, read_all
from dq_engine.runner import Runner
from dq_engine.sequence import Sequence

logger = logging.getLogger(__name__)


def follow(runner: Runner, messages: "queue.SimpleQueue[Message]") -> NoReturn:
    """Do what the messages say, for ever."""
    sequences: dict[int, Sequence] = {}
    while True:
        message = messages.get()
        if isinstance(message, Start):
            started = [slot.sequence(runner.patch_size, runner.feat_dim) for slot in message.slots]
            sequences |= {sequence.slot: sequence for sequence in started}
            runner.start(started)
        else:
            runner.run(message.step(sequences))


def _receive(pipe: BinaryIO, messages: "queue.SimpleQueue[Message]") -> None:
    for message in read_all(pipe):
        messages.put(message)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = open(0, "rb", closefd=False)  # noqa: SIM115  for the life of the process
    first = json.loads(pipe.readline())
    config = EngineConfig.model_construct(**first["config"])
    configure(config.log_level)
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    # Read at once: an engine that ends while this is still loading, or waits for the others, must be noticed.
    threading.Thread(target=_receive, args=(pipe, messages), name="dq-receive", daemon=True).start()
    try:
        parts = load(config, Path(first["path"]), lambda stage, fraction: None, Rank(*first["rank"]))
        gc.collect()
        gc.freeze()  # as in the leader, which would wait too
        follow(parts.runner, messages)
    except Exception:
        logger.exception("a process of a tensor-parallel engine failed")
    os._exit(1)


if __name__ == "__main__":
    main()
