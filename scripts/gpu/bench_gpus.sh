#!/usr/bin/env bash
# Runs the save and load benchmarks on the GPUs of this machine, in under eight minutes, and puts
# result lines and logs into a folder. A step that fails or hangs does not stop the next.
#
#     scripts/gpu/bench_gpus.sh OUT_DIR           two ranks, 20 GiB of state
#     scripts/gpu/bench_gpus.sh --cpu OUT_DIR     the same steps with tiny sizes, without a GPU
#
#     PYTHON      the Python to run with; default python3. The packages are found through
#                 scripts/typing, so that nothing needs to be installed.
#     PROCESSES   ranks; default 2, which may share one GPU (then with gloo)
#     GIB         size of the whole state in the large steps; default 20
#     STEPS       which steps, in order; default "facts memory async sync all small reshard"
#     TMPDIR      where checkpoints go: three times GIB must fit
#
# OUT_DIR/results.jsonl has the result lines, OUT_DIR/log.txt everything that was printed.
set -uo pipefail

tiny=
[[ ${1:-} != --cpu ]] || { tiny=1 && shift; }
if [[ $# -ne 1 || $1 == -* ]]; then
    sed -n '2,/^set /{/^# /s/^# //p;/^#$/s/^#//p}' "${BASH_SOURCE[0]}"
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 1

export PYTHON=${PYTHON:-python3}
export PYTHONPATH=$root/scripts/typing${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
# Multicast over NVLink can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
processes=${PROCESSES:-2}
gib=${GIB:-20}
threads=4
export OMP_NUM_THREADS=8
device=cuda
if [[ $tiny ]]; then
    gib=0.02 threads=2 device=cpu OMP_NUM_THREADS=1
    export CUDA_VISIBLE_DEVICES=
fi
log=$out/log.txt
begin=$SECONDS

say() { printf '%s\n' "$*" | tee -a "$log"; }

# step NAME SECONDS COMMAND...: runs a command with a time limit and goes on whatever comes of it.
step() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    say "=== $name, at most $limit s: $*"
    timeout --kill-after=10 "$limit" "$@" >>"$log" 2>&1
    status=$?
    say "=== $name: status $status after $((SECONDS - start)) s ($((SECONDS - begin)) s in all)"
    # What a killed run left behind would fill the disk.
    rm -rf "$work"/shardplan-bench-*
}

work=$(mktemp -d "${TMPDIR:-/tmp}/bench-gpus-XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

ranks() { # ranks NAME SECONDS PROCESSES SCRIPT ARGUMENT...
    local name=$1 limit=$2 count=$3
    shift 3
    step "$name" "$limit" scripts/launch/torchrun_local.sh -n "$count" "$@" \
        --dir "$work" --timeout 60 --verbose --out "$out/results.jsonl"
}

save_load=(benchmarks/bench_save_load.py --device "$device" --threads "$threads")

{ # read whole before it runs, so that a change of this file meanwhile does no harm
    for name in ${STEPS:-facts memory async sync all small reshard}; do
        case $name in
        facts)
            step facts 20 bash -c "nvidia-smi; df -h '$work'; stat -f '$work'; free -g; nproc; uname -a
                $PYTHON -c 'import torch, shardplan.planner; print(torch.__version__)'"
            ;;
        memory) # this machine's memory may grow only as it is used
            step memory 60 "$PYTHON" benchmarks/touch_memory.py "${tiny:+0.1}${tiny:-96}" 8
            ;;
        async)
            ranks async 200 "$processes" "${save_load[@]}" --gib "$gib" --no-sync --load \
                --async-saves 2 --async-ways own-stager own-prepared stock stock-pinned --step 0.2
            ;;
        sync)
            ranks sync 190 "$processes" "${save_load[@]}" --gib "$gib" --load tp2 --rounds 2 \
                --budget 110 --ways own stock "stock-t$threads" ours torch.save
            ;;
        all)
            if [[ $tiny ]]; then small=0.01; else small=2; fi
            ranks all 90 "$processes" "${save_load[@]}" --gib "$small" --load tp2 shard1 --rounds 3 \
                --budget 65
            ;;
        small)
            if [[ $tiny ]]; then count=50; else count=5000; fi
            ranks small 60 "$processes" "${save_load[@]}" --gib 0.01 --small "$count" --load \
                --rounds 2 --budget 35
            ;;
        reshard)
            if [[ $tiny ]]; then hidden=24 count=2; else hidden=768 count=8; fi
            OMP_NUM_THREADS=1 ranks reshard 60 "$count" benchmarks/bench_reshard.py \
                --hidden "$hidden" --rounds 2
            ;;
        *) say "no such step: $name" ;;
        esac
    done
    say "=== all steps are over after $((SECONDS - begin)) s; $(cat "$out"/results.jsonl 2>/dev/null | wc -l) result lines"
    exit 0
}
