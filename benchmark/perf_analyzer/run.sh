#!/usr/bin/env bash
# NVIDIA's perf_analyzer, which tritonclient's wheel puts into .venv, with its own arguments. The libraries that it wants,
# libb64 and CUDA's runtime, need not be installed: the tritonserver in .venv has them under other names.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[[ -x $root/.venv/bin/perf_analyzer ]] || { echo "run.sh: no perf_analyzer in $root/.venv; run make setup" >&2; exit 1; }
site=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
links=$root/.venv/lib/perf_analyzer
mkdir -p "$links"
ln -sf "$site"/nvidia_pytriton.libs/libb64-*.so.0d "$links/libb64.so.0d"
ln -sf "$site"/nvidia_pytriton.libs/libcudart-*.so.12.* "$links/libcudart.so.12"
LD_LIBRARY_PATH=$links${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$root/.venv/bin/perf_analyzer" "$@"
