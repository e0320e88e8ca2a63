#!/usr/bin/env bash
# Brings .venv up to date: tools/setup.sh [server|test]
#   server  (default) everything that the server, the examples and the demo need
#   test    that, and what the tests need
# A second run with nothing changed ends at once. Environment:
#   PYTHON       the interpreter to make .venv with; the first of python3, python3.12, 3.11, 3.10 that fits by default
#   TORCH_INDEX  an additional package index to take torch from (PyTorch's index of CPU or CUDA builds)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-server}
venv=.venv

fail() {
    printf '\n%s\n' "$@" >&2
    exit 1
}

fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

choose_python() {
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not there."
        fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 || true); Python 3.10, 3.11 or 3.12 is needed."
        return
    fi
    local candidate
    for candidate in python3 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            PYTHON=$candidate
            return
        fi
    done
    fail "No Python 3.10, 3.11 or 3.12 found; python3 is $(python3 --version 2>&1 || true)." \
        "Install one and name it: make PYTHON=/path/to/python3.12" \
        "Debian and Ubuntu: sudo apt-get install -y python3 python3-venv libpython3-dev"
}

torch_build() { [[ $(nvidia-smi -L 2>/dev/null) == *"GPU "[0-9]* ]] && echo gpu || echo cpu; }

# What pip cannot bring. Every missing thing is named, with the one line that installs them all.
check_system() {
    local missing=() packages=() version
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [[ $(uname -sm) == "Linux x86_64" ]] ||
        fail "This is $(uname -sm); the tritonserver that is installed here runs on Linux x86_64 only. Use the container."
    "$PYTHON" -c 'import sys, os; libc = os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")
sys.exit((int(libc[0]), int(libc[1])) < (2, 35))' ||
        fail "tritonserver needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04); here it is $(getconf GNU_LIBC_VERSION). Use the container."
    if ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
        missing+=("the venv module of Python $version")
        packages+=("python$version-venv")
    fi
    if ! "$PYTHON" tools/libpython.py >/dev/null; then
        missing+=("libpython$version.so.1.0, the shared library of Python $version (Triton's Python backend links it)")
        packages+=("libpython$version")
    fi
    # Triton's compiler builds small C programs against Python when a kernel is first used.
    if [[ $(torch_build) == gpu ]]; then
        if [[ -z ${CC:-} ]] && ! command -v gcc clang >/dev/null; then
            missing+=("a C compiler, for the GPU's kernels")
            packages+=("gcc" "libc6-dev")
        fi
        if ! "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))'; then
            missing+=("Python.h of Python $version, for the GPU's kernels")
            packages+=("libpython$version-dev")
        fi
    fi
    ((${#missing[@]} == 0)) || fail "Missing on this machine:" "${missing[@]/#/  - }" \
        "Debian and Ubuntu: sudo apt-get install -y ${packages[*]}" \
        "For another Python: make PYTHON=/path/to/python3.12 (3.10 to 3.12, built with its shared library)"
}

# What .venv was made from. It holds the version of the interpreter, so that `make PYTHON=` remakes it.
key() {
    { echo "$1"; "$venv/bin/python" -VV 2>/dev/null || true; echo "$PWD"; shift; cat "$@" tools/setup.sh; } | sha256sum
}

up_to_date() { [[ -x $venv/bin/python && -f $venv/.setup-$1 && $(<"$venv/.setup-$1") == "$2" ]]; }

# pip also reports as errors the requirements that --no-deps leaves out on purpose: its words are shown if it fails.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >"$venv/setup.log" 2>&1 ||
        fail "$(tail -n 30 "$venv/setup.log")" "pip install $* failed; the whole output is in $venv/setup.log"
}

install_server() {
    local build version site
    build=$(torch_build)
    echo "setup: $venv with $("$venv/bin/python" --version) and torch for a ${build^^}; this takes some minutes, once"
    pip_install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "requirements/$build.txt" -r requirements/client.txt
    pip_install --no-deps -r requirements/no-deps.txt -r requirements/server-no-deps.txt
    pip_install --no-deps --no-build-isolation --editable backend_src
    # The Python backend starts the stub that lies beside it: the one of this interpreter's version.
    version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/pytriton/tritonserver
    install -m 755 "$site/python_backend_stubs/$version/triton_python_backend_stub" "$site/backends/python/"
}

install_test() {
    echo "setup: the tests' packages"
    pip_install -r requirements/test.txt -c requirements/engine.txt
    pip_install --no-deps -r requirements/test-no-deps.txt
}

server_files=(requirements/{engine,cpu,gpu,client,admin,no-deps,server-no-deps}.txt backend_src/pyproject.toml)
test_files=(requirements/test.txt requirements/test-no-deps.txt)

[[ $what == server || $what == test ]] || fail "usage: tools/setup.sh [server|test]"

# One at a time: make demo in one terminal and make serve in another would install into each other's way.
exec {lock}<tools/setup.sh
flock --nonblock "$lock" || { echo "setup: waits for another one that is under way" && flock "$lock"; }

if [[ -n ${PYTHON:-} && -x $venv/bin/python ]]; then
    choose_python
    [[ $("$PYTHON" -VV) == "$("$venv/bin/python" -VV)" ]] || rm -rf "$venv"
fi
if ! up_to_date server "$(key server "${server_files[@]}")"; then
    choose_python
    check_system
    rm -f "$venv"/.setup-*
    fits "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$venv"
    pip_install --upgrade pip "setuptools>=77" wheel
    install_server
    key server "${server_files[@]}" >"$venv/.setup-server"
fi
if [[ $what == test ]] && ! up_to_date test "$(key test "${test_files[@]}")"; then
    install_test
    key test "${test_files[@]}" >"$venv/.setup-test"
fi
