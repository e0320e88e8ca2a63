"""What is logged, to standard error: messages as text, and each request's end as one line of JSON."""

import json
import logging
import time

_REQUESTS = logging.getLogger("dq_engine.requests")


def configure(level: str) -> None:
    """Set the process's logging up: this package's messages from `level` on, other packages' warnings.

    Args:
        level: "debug", "info", "warning" or "error".
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("dq_engine").setLevel(level.upper())
    if not _REQUESTS.handlers:
        _REQUESTS.addHandler(logging.StreamHandler())  # the line as it is: its time and level are in it
        _REQUESTS.propagate = False


def log_request(level: int, fields: dict) -> None:
    """Write one request's line.

    Args:
        level: of the logging module.
        fields: what json takes.
    """
    if _REQUESTS.isEnabledFor(level):
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        head = {"time": stamp, "level": logging.getLevelName(level).lower(), "event": "request"}
        _REQUESTS.log(level, json.dumps(head | fields))
