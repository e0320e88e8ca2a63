"""How the commands under benchmark/ run: what goes wrong outside of them is one line, and no traceback."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from dq_engine.errors import CheckpointError, RequestError


def run(command: Callable[[], object]) -> None:
    """Run a typer app, to the end of the process."""
    with errors_in_one_line():
        command()


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with status 1 for what an engine, a server or a file brought about."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, CheckpointError, RequestError) as error:
        sys.exit(f"error: {one_line(error)}")


def one_line(error: Exception) -> str:
    """What an error says, of a file its name first."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def in_a_folder(path: Path | None) -> Path | None:
    """A file that a command writes in the end; refused at once where there is no folder for it."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {path.parent}")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a directory")
    return path
