#!/usr/bin/env bash
# Runs a Python script under torchrun on this machine, on ports that are free.
#
#     torchrun_local.sh -n PROCESSES SCRIPT [ARGUMENT ...]
#     torchrun_local.sh -n 4 scripts/hybrid/train.py --tp 2 --dp 2 --ep 2 --until 20
#
#     -n PROCESSES    processes to start, one per rank; "gpu" for one per GPU
#     PYTHON          the Python to run with; default: the checkout's .venv, else python3
#     OMP_NUM_THREADS threads of each process; default 1
#
# Exits with torchrun's status. SIGTERM and SIGINT end all processes.
set -euo pipefail

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
}

processes=
while getopts :n:h option; do
    case $option in
    n) processes=$OPTARG ;;
    h) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[[ -n $processes && $# -gt 0 ]] || { usage >&2 && exit 2; }

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The loopback address works where the host's own name does not resolve.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
exec "$python" -m torch.distributed.run \
    --nnodes=1 --nproc-per-node="$processes" \
    --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost \
    "$@"
