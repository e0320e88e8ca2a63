"""What is logged, to standard error: messages as text, and each request's end as one line of JSON. Times are UTC."""

import datetime
import json
import logging

_REQUESTS = logging.getLogger("dq_engine.requests")


def configure(level: str) -> None:
    """Set the process's logging up: this package's messages from `level` on, other packages' warnings.

    Args:
        level: "debug", "info", "warning" or "error".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
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
        now = datetime.datetime.now(datetime.timezone.utc)
        head = {"time": _stamp(now), "level": logging.getLevelName(level).lower(), "event": "request"}
        _REQUESTS.log(level, json.dumps(head | fields))


class _Formatter(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _stamp(datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc))


def _stamp(time: datetime.datetime) -> str:
    return time.isoformat(timespec="milliseconds")
