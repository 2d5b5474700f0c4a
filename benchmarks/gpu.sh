#!/usr/bin/env bash
# What a GPU is for: correctness first, then speed. `benchmarks/gpu.sh [PART ...]`, each part under 8 minutes; docs/gpu.md has more.
#
#   tests     the kernels' tests on the device, every case of the benchmark against its reference, tests marked gpu
#   sanitize  compute-sanitizer (memcheck, racecheck) over small cases, where it is installed and runs
#   families  small checkpoints of every family, tokens equal to the CPU's
#   kernels   every kernel against the device's own ceilings
#   models    models of 4 to 8 billion random parameters beside transformers' continuous batching
#
# Needs no network and no installation: PYTHON (python3) has torch, triton and transformers, `benchmarks/gpu_wheels` has brought the
# rest. Results go to $OUT, else to benchmarks/results/local. Further arguments of a part: KERNELS="--quick --only decode", FAMILIES,
# MODELS, and CHECKS for the cases of tests and sanitize.
set -uo pipefail
cd "$(dirname "$0")/.."
script=benchmarks/gpu.sh
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results/local}
limit_s=${PART_LIMIT_S:-475}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
export TRITON_DEFAULT_FP_FUSION=1 TRITON_INTERPRET=${TRITON_INTERPRET:-0}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}
unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE # some images set them; float32 is float32 here
mkdir -p "$out"
out=$(cd "$out" && pwd)

compiled=$TRITON_CACHE_DIR/all_cases_were_compiled
site=
cleanup() { [[ -z $site ]] || rm -rf "$site"; }
trap cleanup EXIT

add_wheels() {
    compgen -G 'build/gpu_wheels/*.whl' >/dev/null || return 0
    site=$(mktemp -d)
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" build/gpu_wheels/*.whl || return 1
    export PYTHONPATH="$site:$PYTHONPATH"
}

at_once() { # children side by side: at most $1, each with two cores
    local pairs=$(($(nproc) / 2))
    echo $((pairs < 1 ? 1 : pairs < $1 ? pairs : $1))
}

check_cases() { # all of them, side by side, since most of their time is Triton's compilation; $1 seconds at most
    mkdir -p "$TRITON_CACHE_DIR" && touch "$compiled"
    "$python" benchmarks/kernels.py --check --at-once "$(at_once 4)" --budget-s "$1" --out "$out/checks" ${CHECKS:-}
}

tests() {
    local failed=0
    check_cases 150 || failed=1
    local pytest=("$python" -m pytest -p no:cacheprovider -q -rf --tb=short --continue-on-collection-errors) side_by_side=()
    "$python" -c 'import xdist' 2>/dev/null && side_by_side=(-n 8)
    timeout 180 "${pytest[@]}" "${side_by_side[@]}" tests/kernels -k 'triton or on_device' 2>&1 | tee "$out/tests.log" || failed=1
    local marked
    mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    timeout 130 "${pytest[@]}" -m gpu "${marked[@]}" 2>&1 | tee -a "$out/tests.log" || failed=1
    return $failed
}

sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: skipped"; return 0; }
    local tiny=(benchmarks/kernels.py --tiny --check ${CHECKS:-}) scratch tool failed=0 ran
    scratch=$(mktemp -d)
    "$python" "${tiny[@]}" --at-once "$(at_once 4)" --budget-s 90 --out "$scratch" # compiles, which takes longer under a tool
    # the caching allocator would hide what lies just outside a tensor; tiny sizes, since every access is watched
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
        ran=$out/sanitize-$tool.log
        timeout 180 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 \
            "$python" "${tiny[@]}" --in-process --out "$scratch" >"$ran" 2>&1
        local code=$?
        tail -n 4 "$ran"
        if grep -q 'Device not supported' "$ran"; then
            echo "compute-sanitizer does not run on this device: skipped"
        elif ((code == 124)) && ! grep -q '^=========.*\(Invalid\|Error: Race\|Misaligned\)' "$ran"; then
            echo "$tool found nothing in the cases that $ran names, then ran out of time"
        elif ((code)); then
            echo "$tool ended with $code, see $ran"
            failed=1
        fi
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    rm -rf "$scratch"
    return $failed
}

families() { "$python" benchmarks/gpu_families.py --at-once "$(at_once 6)" --out "$out" ${FAMILIES:-}; }
kernels() {
    if [[ ! -e $compiled && -z ${KERNELS:-} ]]; then check_cases 120; fi # else compilation one by one would cost the last cases
    "$python" benchmarks/kernels.py --budget-s $((limit_s - SECONDS - 20)) --out "$out" ${KERNELS:-}
}
models() { "$python" benchmarks/gpu_models.py --out "$out" ${MODELS:-}; }

known=(tests sanitize families kernels models)
if [[ ${1:-} == --alone ]]; then # a part by itself, under the time limit below
    "$2"
    exit
fi
parts=("$@")
((${#parts[@]})) || parts=("${known[@]}")
for part in "${parts[@]}"; do
    [[ " ${known[*]} " == *" $part "* ]] || { echo "gpu.sh knows ${known[*]}, not $part" >&2; exit 2; }
done
export PYTHONPATH="$PWD/kernels:$PWD/worker:$PWD/cluster:$PWD${PYTHONPATH:+:$PYTHONPATH}"
add_wheels || { echo "gpu.sh: the wheels in build/gpu_wheels do not fit $("$python" -V 2>&1); run benchmarks/gpu_wheels" >&2; exit 2; }

running=
trap '[[ -z $running ]] || kill "$running"; exit 143' TERM INT HUP # timeout has a group of its own, and hands it on to that

failed=()
for part in "${parts[@]}"; do
    printf '\n==> %s\n' "$part"
    begin_s=$SECONDS
    timeout --kill-after=10 "$limit_s" "$BASH" "$script" --alone "$part" &
    running=$!
    wait "$running" || failed+=("$part")
    running=
    echo "$part: $((SECONDS - begin_s)) s"
done
if ((${#failed[@]})); then
    echo "Not sound: ${failed[*]}"
    exit 1
fi
echo "Sound: ${parts[*]}; figures in $out"
