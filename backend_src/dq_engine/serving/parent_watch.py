"""Ends this process when its parent has ended, whatever the rest of the process is stuck in.

Triton's stub looks for its parent too, but when tritonserver is killed while a response is being sent, it hangs in
its own exit (seen with 2.51), and would keep the worker and its memory.
"""

import logging
import os
import select
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def end_with_parent(clean_up: Callable[[], None]) -> None:
    """From now on call `clean_up` (on a thread of its own) when the parent has ended, and exit right after it."""
    try:
        pidfd = os.pidfd_open(os.getppid())
    except ProcessLookupError:  # it is gone already, and so should this process be
        os._exit(1)
    threading.Thread(target=_watch, args=(pidfd, clean_up), name="dq-parent-watch", daemon=True).start()


def _watch(pidfd: int, clean_up: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    try:
        logger.error("the server has died; ending")
        clean_up()
    finally:
        os._exit(1)
