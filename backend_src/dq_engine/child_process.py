"""Starts a module of this package in a Python process of its own."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = str(Path(__file__).parents[1])
# What `python -m` does, but without the current directory, which -m puts first on sys.path: a json.py that lies there
# would be taken for Python's own. (-P and PYTHONSAFEPATH, which are for this, came with Python 3.11.)
_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def start_module(
    module: str, *arguments: str, environment: Mapping[str, str] = os.environ, stdin: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Run a module as a program. It imports this same copy of the package.

    Args:
        module: its full name.
        arguments: of its command line.
        environment: the process's, but for PYTHONPATH, which is added to.
        stdin: file descriptor of its standard input; by default a pipe to it.

    Raises:
        OSError: there is no memory for it, or no file handle.
    """
    if sysconfig.get_path("purelib") != _PACKAGES:  # found by sys.path, which the process does not inherit
        paths = os.pathsep.join(filter(None, [_PACKAGES, environment.get("PYTHONPATH")]))
        environment = {**environment, "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", _RUN, module, *arguments], stdin=stdin, env=dict(environment))
