"""A process that ends, as by kill -9, at a chosen call of the system."""

import os
from collections.abc import Callable


class Ending:
    """Wraps what calls the system; the process is gone at the `step`-th of the calls, the first is 1."""

    def __init__(self, step: int) -> None:
        self._left = step

    def counted(self, function: Callable) -> Callable:
        """The function, each call of it counted."""

        def call(*arguments):
            self._left -= 1
            if self._left == 0:
                os._exit(1)
            return function(*arguments)

        return call

    def halved(self, file) -> "HalvedFile":
        """The open file; each half of what is written to it is counted, and flushed before the next."""
        return HalvedFile(file, self.counted(file.write))


class HalvedFile:
    def __init__(self, file, write: Callable) -> None:
        self._file, self._write = file, write

    def __enter__(self) -> "HalvedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data) -> None:
        for part in data[: len(data) // 2], data[len(data) // 2 :]:
            self._write(part)
            self._file.flush()

    def __getattr__(self, name: str):
        return getattr(self._file, name)
