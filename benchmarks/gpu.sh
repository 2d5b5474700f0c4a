#!/usr/bin/env bash
# What a GPU is for: correctness first, then speed. `benchmarks/gpu.sh [PART ...]`, each part under 8 minutes; docs/gpu.md has more.
#
#   tests     every case of the kernels' benchmark against its reference, the kernels' tests on the device, tests marked gpu
#   families  small checkpoints of every family, tokens equal to the CPU's
#   kernels   every kernel against the device's own ceilings
#   models    models of 8 billion random parameters against the device's own ceilings
#
# Needs no network and no installation: PYTHON (python3) has torch, triton and transformers, `benchmarks/gpu_wheels` has brought the
# rest. Results go to $OUT, else to benchmarks/results/local; a run that was ended goes on where it was, with the same command.
# Further arguments of a part: KERNELS="--quick --only decode", FAMILIES, MODELS, and CHECKS for the cases of tests.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results/local}
limit_s=${PART_LIMIT_S:-475}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
export TRITON_DEFAULT_FP_FUSION=1 TRITON_INTERPRET=${TRITON_INTERPRET:-0}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}
export PYTHONPATH="$PWD/kernels:$PWD/worker:$PWD/cluster:$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE # some images set them; float32 is float32 here
mkdir -p "$out"
out=$(cd "$out" && pwd)
export TRANSOM_PASSED_TESTS=$out/passed_tests.txt
site=
trap '[[ -z $site ]] || rm -rf "$site"' EXIT

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

check_cases() { # side by side, since most of their time is Triton's compilation; $1 seconds at most
    "$python" -m benchmarks.engine.kernels --check --at-once "$(at_once 4)" --budget-s "$1" --out "$out/checks" ${CHECKS:-}
}

tests() {
    local failed=0 marked side_by_side=()
    local pytest=("$python" -m pytest -p no:cacheprovider -p benchmarks.gpu.resumed_tests -q -rf --tb=short --continue-on-collection-errors)
    check_cases 150 || failed=1
    "$python" -c 'import xdist' 2>/dev/null && side_by_side=(-n 8)
    timeout 180 "${pytest[@]}" "${side_by_side[@]}" tests/kernels -k 'triton or on_device' 2>&1 | tee "$out/tests.log" || failed=1
    mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    timeout 130 "${pytest[@]}" -m gpu "${marked[@]}" 2>&1 | tee -a "$out/tests.log" || failed=1
    return $failed
}

families() {
    "$python" -m benchmarks.gpu.families --at-once "$(at_once 6)" --budget-s "$limit_s" --out "$out" ${FAMILIES:-}
}

kernels() {
    local begin_s=$SECONDS # compilation one by one would cost the last cases
    [[ -n ${KERNELS:-} ]] || check_cases 120
    "$python" -m benchmarks.engine.kernels --budget-s $((limit_s - SECONDS + begin_s)) --out "$out" ${KERNELS:-}
}

models() { "$python" -m benchmarks.gpu.models --budget-s "$limit_s" --out "$out" ${MODELS:-}; }

known=(tests families kernels models)
parts=("$@")
((${#parts[@]})) || parts=("${known[@]}")
for part in "${parts[@]}"; do
    [[ " ${known[*]} " == *" $part "* ]] || { echo "gpu.sh knows ${known[*]}, not $part" >&2; exit 2; }
done
add_wheels || { echo "gpu.sh: the wheels in build/gpu_wheels do not fit $("$python" -V 2>&1); run benchmarks/gpu_wheels" >&2; exit 2; }

failed=()
for part in "${parts[@]}"; do
    printf '\n==> %s\n' "$part"
    begin_s=$SECONDS
    "$part" || failed+=("$part")
    echo "$part: $((SECONDS - begin_s)) s"
done
if ((${#failed[@]})); then
    echo "Not sound: ${failed[*]}"
    exit 1
fi
echo "Sound: ${parts[*]}; figures in $out"
