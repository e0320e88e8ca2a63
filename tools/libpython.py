"""Prints the directory of this interpreter's shared library, which Triton's Python stub links against.

The line is empty where the dynamic loader finds the library by itself. Ends with 1 where there is none.
"""

import ctypes
import sys
import sysconfig
from pathlib import Path


def main() -> int:
    name = f"libpython{sysconfig.get_config_var('py_version_short')}.so.1.0"
    # An interpreter of its own (pyenv, conda) has the library beside it, and it must be preferred to the system's.
    for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        if folder and (Path(folder) / name).is_file():
            print(folder)
            return 0
    try:
        ctypes.CDLL(name)
    except OSError:
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
