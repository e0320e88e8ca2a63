#!/usr/bin/env bash
# Runs tritonserver with this repository's models until it ends or SIGINT or SIGTERM comes: the container's entrypoint
# and what `make serve`, the demo and the tests run. Everything that it started is gone within 5 s of the signal.
# Environment:
#   MODEL               checkpoint directory or Hugging Face id; DQ_ENGINE_MODEL, or the one in config.pbtxt, by default
#   HTTP_PORT GRPC_PORT METRICS_PORT   8000, 8001, 8002
#   HOST                the address to listen on; 127.0.0.1, and in the container 0.0.0.0: who publishes its ports decides
#   MODEL_CONTROL_MODE  none (default), or explicit: clients may load and unload models. Only where every client is
#                       trusted: Triton lets them load any code.
#   MODEL_REPOSITORY    ../model_repository by default
#   LOG_VERBOSE         0
# and every DQ_ENGINE_* setting (README). Further arguments go to tritonserver.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
readonly exit_timeout_s=2 # that tritonserver gives its models to end, of the 5 s that a stop may take

if [[ -x /opt/tritonserver/bin/tritonserver ]]; then
    triton=/opt/tritonserver
    site=
elif [[ -x $root/.venv/bin/python ]]; then
    # The stub takes the environment of the python3 on PATH, and ignores PYTHONPATH.
    export PATH=$root/.venv/bin:$PATH VIRTUAL_ENV=$root/.venv
    site=$("$root/.venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    triton=$site/pytriton/tritonserver
    libpython=$(python3 "$root/tools/libpython.py") || {
        echo "entrypoint: $(python3 --version) has no shared library; run make setup" >&2
        exit 1
    }
    export LD_LIBRARY_PATH=$site/nvidia_pytriton.libs${libpython:+:$libpython}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
    echo "entrypoint: no tritonserver in /opt/tritonserver, and no $root/.venv; run make setup" >&2
    exit 1
fi

if [[ -n ${MODEL:-} ]]; then
    # A relative directory is meant from where the user is.
    [[ -d $MODEL ]] && MODEL=$(cd "$MODEL" && pwd)
    export DQ_ENGINE_MODEL=$MODEL
fi
if [[ -e 1/model.py ]]; then # the folder of a model: the stubs would take it for every model's
    echo "entrypoint: $PWD/1/model.py would be run in the place of every model: start elsewhere" >&2
    exit 1
fi
host=${HOST:-127.0.0.1}
if [[ ! $host =~ ^(127\.|localhost$|::1$) && -z ${DQ_ENGINE_ADMIN_TOKEN:-} ]]; then
    echo "entrypoint: without DQ_ENGINE_ADMIN_TOKEN whoever reaches a port may administer this server" >&2
fi
model=${DQ_ENGINE_MODEL:-}
if [[ -n $model && $model != "~"* && ! -d $model && ! $model =~ ^[^./][^/]*/[^/]+$ ]]; then
    echo "entrypoint: $model is neither a directory nor a hub id of the form owner/name" >&2
    exit 1
fi
# What looks like a hub id may be a directory's name with a slip in it: the hub's answer would be about the network.
if [[ -n $model && $model != "~"* && ! -d $model && -d ${model%/*} ]]; then
    echo "entrypoint: there is no directory ${model##*/} in ${model%/*}" >&2
    exit 1
fi
# One prefix a server: several share a machine's /dev/shm, and what a killed one left can be told apart.
shm=voxcpm2_$$_$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')_
export START_ERROR_FILE=/dev/shm/${shm}start_error # voxcpm2's model.py writes why the engine did not start

arguments=(
    --model-repository="${MODEL_REPOSITORY:-$root/model_repository}"
    --backend-directory="$triton/backends"
    --backend-config="python,shm-region-prefix-name=$shm"
    --model-control-mode="${MODEL_CONTROL_MODE:-none}"
    --http-address="$host" --http-port="${HTTP_PORT:-8000}"
    --grpc-address="$host" --grpc-port="${GRPC_PORT:-8001}"
    --grpc-header-forward-pattern='^user-agent$' # by which voxcpm2 tells gRPC from HTTP, see its model.py
    --metrics-address="$host" --metrics-port="${METRICS_PORT:-8002}"
    --exit-timeout-secs="$exit_timeout_s"
    --log-verbose="${LOG_VERBOSE:-0}"
)
command -v nvidia-smi >/dev/null || arguments+=(--allow-gpu-metrics=false)
[[ ${MODEL_CONTROL_MODE:-none} == explicit ]] && arguments+=("--load-model=*")

# The ports must be free before anything is loaded: Triton opens them last, when the checkpoint is in memory.
python3 -I -S - "${arguments[@]}" "$@" <<'PYTHON' || exit 1
import socket
import sys

options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
held = []
for name in "http", "grpc", "metrics":
    if options.get(f"allow-{name}", "true").lower() in ("false", "0"):
        continue
    address, port = options[f"{name}-address"], options[f"{name}-port"]
    try:
        if not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError("must be from 1 to 65535")
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        held.append(socket.socket(family, kind, protocol))
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has just been closed is free
        held[-1].bind(place)
        held[-1].listen()  # so that one port for two of them is noticed as well
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sys.exit(f"entrypoint: {name.upper()}_PORT: {address}:{port}: {reason.lower()}")
PYTHON

# The server is the leader of a process group of its own (set -m): a terminal's Ctrl-C reaches this script only, which
# then stops the server in order, and what is left of a server that died (its stubs outlive it) is ended as one.
# The keeper does that last part. It reads from a pipe of which this script alone holds the other end, so that it comes
# to it however this script ends, killed or not; it is of another session, so that what ends this script spares it.
exec {alive}> >(exec setsid "$BASH" -c '
    trap "" INT TERM HUP
    read -r group || exit
    read -r _
    kill -TERM -- "-$group"
    for _ in {1..8}; do kill -0 -- "-$group" || break; sleep 0.05; done
    kill -KILL -- "-$group"
    # The last of them may be zombies that are not ours to reap.
    for _ in {1..8}; do kill -0 -- "-$group" || break; sleep 0.05; done
    rm -f "/dev/shm/$0"*' "$shm" 2>/dev/null >/dev/null)
keeper=$!

set -m
"$triton/bin/tritonserver" "${arguments[@]}" "$@" </dev/null {alive}>&- &
server=$!
set +m
echo "$server" >&"$alive"

stopping=
stop() {
    [[ -z $stopping ]] || return 0
    stopping=1
    echo "entrypoint: stopping" >&2
    # The whole group: tritonserver waits for running streams, and the engine worker ends them, each with an error.
    kill -TERM -- "-$server" 2>/dev/null
    # tritonserver does not always end when its own time is over: half a second more, then the keeper ends it.
    local end=$((${EPOCHREALTIME/[.,]/} + exit_timeout_s * 1000000 + 500000))
    while kill -0 "$server" 2>/dev/null && ((${EPOCHREALTIME/[.,]/} < end)); do sleep 0.05; done
}
trap stop INT TERM HUP

# When voxcpm2's stub has died (out of memory, say), Triton 2.51 starts no other, answers none of its streams, and goes on to
# say that it is ready. So such a server is ended, with status 1, and whoever started it may start it again.
lost=
lose() {
    [[ -z $stopping ]] || return 0
    lost=1
    echo "entrypoint: the process of the model voxcpm2 has died, and Triton does not start it again: the server ends" >&2
    stop
}
trap lose USR1
watch() {
    local stubs='' pid
    while sleep 2 && kill -0 "$server"; do
        for pid in $stubs; do # A zombie: Triton waits for those that it ends itself.
            [[ $(<"/proc/$pid/stat") != *") Z $server "* ]] || { kill -USR1 $$; return; }
        done
        stubs=$(grep -lsF voxcpm2/1/model.py /proc/[0-9]*/cmdline | tr -dc '0-9\n')
    done
}
watch </dev/null >/dev/null 2>&1 {alive}>&- &
watcher=$!

wait "$server" # returns early, after the trap, when a signal comes
status=$?
[[ -z $stopping ]] || status=${lost:-0}
kill "$watcher" 2>/dev/null
# Said once more, as Triton's own tables come after it.
[[ $status == 0 || ! -s $START_ERROR_FILE ]] || echo "entrypoint: $(head -n 1 "$START_ERROR_FILE")" >&2
exec {alive}>&-
wait "$keeper" 2>/dev/null
exit "$status"
