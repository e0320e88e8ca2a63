"""Processes below another one, such as the parts of a server."""

import contextlib

import psutil


def processes_below(pid: int, mark: str) -> list[psutil.Process]:
    """Those of a process whose name or command line holds a text; some of the others may just be ending."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            if mark in process.name() or mark in " ".join(process.cmdline()):
                found.append(process)
    return found
