#!/usr/bin/env bash
# Checks and timings of one GPU, in phases ordered by value. docs/gpu.md says how to run it and how to read it.
#
#     bash benchmarks/gpu.sh [PHASE ...]      from anywhere; works in a checkout that is not installed, without a network
#
# A phase that fails or reaches its limit does not stop the others. Everything is written while it happens.
#
# Environment: OUT, folder of the at most eight result files (runs/gpu). CARRY, folder made by carry.sh (.gpu).
# SECONDS_TOTAL, after which nothing begins (470). DEVICE=cpu QUICK=1 tries all phases that a CPU can run.
# PYTHON, the interpreter. JOBS, comparison cells at a time (8).
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 2
out=${OUT:-runs/gpu}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
if [ -n "$(ls -A "$out")" ] && ! head -n 1 "$out/log.txt" 2> /dev/null | grep -q '^phases: '; then
    echo "$out holds other files than the results of this script: choose another folder with OUT" >&2
    exit 2
fi
carry=$(realpath -m "${CARRY:-.gpu}")
device=${DEVICE:-cuda}
quick=${QUICK:+--quick}
total=${SECONDS_TOTAL:-470}
python=${PYTHON:-$(command -v python3 || command -v python)}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=()
unset DETR_BF_OPS DETR_BF_CUDA_VARIANTS

declare -A limit=([build]=90 [correct]=110 [operators]=75 [steps]=110 [demo]=75 [attention]=30 [inference]=40
                  [exported]=170 [loading]=45 [sanitize]=60 [profile]=40 [compile]=150 [compare]=190)
slower=1
[ "$device" = cuda ] || slower=8  # a CPU may be shared

say() { printf '\n=== %s, %ds of %ds ===\n' "$*" "$SECONDS" "$total"; }

phase() {  # phase NAME: run the function of that name within its limit, or what is left of the total
    local name=$1 allowed=$((slower * limit[$1])) left=$((total - SECONDS)) code=0 begin=$SECONDS
    ((allowed > left)) && allowed=$left
    if ((allowed < 8)); then
        say "$name: left out, no time"
        failed+=("$name (left out)")
        return
    fi
    say "$name, at most ${allowed}s"
    # At the limit all programs of the phase get SIGTERM. bash outlives it, and runs the rest of the phase, until SIGKILL.
    ALLOWED=$((allowed - 5)) timeout --kill-after=5 "$allowed" \
        bash -c "trap : TERM; $(declare -f); set -uo pipefail; $name" < /dev/null || code=$?
    echo "--- $name: exit $code after $((SECONDS - begin))s"
    ((code)) && failed+=("$name (exit $code)")
    return 0
}

timings() { "$python" benchmarks/gpu.py "$1" --device "$device" --seconds "$((ALLOWED - 8))" --output "$out/results.json" $quick; }

prepare() {
    if compgen -G "$carry/*.whl" > /dev/null; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" \
            "$carry"/*.whl || return 1
    fi
    # Nothing is installed: detr_bf.ops and detr_bf.configs are links, as pip would place them.
    mkdir -p "$scratch/tree/detr_bf" && ln -s "$root"/detr_bf/* "$scratch/tree/detr_bf/" || return 1
    ln -s "$root/ops" "$scratch/tree/detr_bf/ops" && ln -s "$root/configs" "$scratch/tree/detr_bf/configs" || return 1
    export PYTHONSAFEPATH=1 PYTHONPATH="$scratch/tree:$scratch/site:$root/benchmarks:$root${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$scratch/pycache TQDM_DISABLE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    export TRITON_CACHE_DIR=$scratch/triton TORCHINDUCTOR_CACHE_DIR=$scratch/inductor DETR_BF_HOME=$scratch/home
    export TORCH_EXTENSIONS_DIR=$scratch/extensions
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,clocks.mem,temperature.gpu --format=csv 2> /dev/null
    nvcc --version 2> /dev/null | tail -n 1
    c++ --version 2> /dev/null | head -n 1
    nproc
    "$python" - << 'P'
import importlib, sys

import torch
print("python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.is_available())
for name in ("torchvision", "timm", "transformers", "numpy", "scipy", "pycocotools", "omegaconf", "msgspec", "filelock",
             "safetensors", "matplotlib", "pytest", "xdist", "mlxtend", "skimage"):
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "present"), end="; ")
    except ImportError as error:
        print(f"{name} IS MISSING ({error})", end="; ")
print()
P
}

build() {  # machine code for this GPU only; a library of the same sources is kept, and one is carried in case it fails
    local code=0
    "$python" - << 'P' || code=$?
import json, os, sys, time
sys.path.insert(0, "ops")
import build
record = build.FOLDER / build.RECORD
wanted = ["cpu", "cuda"] if os.environ["device"] == "cuda" else ["cpu"]

def not_wanted():
    raise build.BuildError("this is a run on a CPU")

if record.is_file() and json.loads(record.read_text())["sources"] == build.digest_of_sources() and all(
    (build.FOLDER / f"{name}.so").is_file() for name in wanted
):
    print("compiled from these sources already")
    sys.exit()
build.CUDA_ARCHITECTURES = ("90",)
build.find_cuda = build.find_cuda if "cuda" in wanted else not_wanted
begin = time.monotonic()
results = build.build(strict=True)
for name, result in results.items():
    print(f"{name}: {'NOT BUILT: ' if isinstance(result, build.BuildError) else ''}{result}")
print(f"{time.monotonic() - begin:.0f} s")
sys.exit(any(isinstance(results[name], build.BuildError) for name in wanted))
P
    if ((code)) && [ -d "$carry/compiled" ]; then
        echo "the carried operators are used"
        mkdir -p ops/compiled && cp "$carry"/compiled/* ops/compiled/
    fi
    "$python" -m detr_bf.ops || code=1
    "$python" -c "import sys, torch; from detr_bf.ops import library; sys.exit(not library.compiled(torch.device('$device')))" \
        || code=1
    return $code
}

correct() {  # tests that need a GPU; on a CPU those of the same files that are for a CPU
    local select=gpu files=(tests/ops tests/detectors/test_detectors_on_devices.py tests/engine/test_trainer.py)
    files+=(tests/engine/test_waits.py tests/common/test_devices.py)
    [ "$device" = cuda ] || select="not slow and not full and not gpu"
    [ -z "$quick" ] || files=(tests/common/test_devices.py)
    # Several processes share the GPU: its tests are small, and those that are not wait for each other.
    OMP_NUM_THREADS=2 "$python" -m pytest -v --tb=short -n "$TEST_PROCESSES" -m "$select" -p no:cacheprovider \
        -o pythonpath= -o timeout=50 "${files[@]}" > "$out/tests.txt" 2>&1
    local code=$?
    grep -E '(FAILED|ERROR|^E  )' "$out/tests.txt" | head -n 60
    tail -n 1 "$out/tests.txt"
    return $code
}

operators() {
    [ -f "$DEFORMOPS" ] || { echo "deformops is not ready:"; tail -n 3 "$scratch/deformops.log"; }
    timings operators
}
attention() { timings attention; }
steps() { timings steps; }
inference() { timings inference; }
exported() { CARRY=$carry timings exported; }

train_demo() {  # train_demo FOLDER [KEY=VALUE ...]
    local folder=$1
    shift
    "$python" tools/train_net.py --config configs/demo.yaml output_dir="$folder" device="$device" \
        train.precision="$([ "$device" = cuda ] && echo bf16 || echo float32)" \
        data.train.images="$scratch/digits/train" data.train.annotations="$scratch/digits/train.json" \
        data.val.images="$scratch/digits/val" data.val.annotations="$scratch/digits/val.json" \
        ${quick:+train.max_steps=2 train.epochs=1} "$@"
}

wait_for_digits() {
    for _ in $(seq 60); do [ -f "$scratch/digits.done" ] && break; sleep 1; done
    [ -f "$scratch/digits/val.json" ] || { cat "$scratch/digits.log"; return 1; }
}

demo() {  # `make demo` on this device, to its AP
    wait_for_digits || return 1
    train_demo "$scratch/demo" data.workers="$WORKERS"
    local code=$?
    cp "$scratch/demo/metrics.jsonl" "$out/demo.jsonl" 2> /dev/null
    return $code
}

loading() {  # seconds of a step of the demo, loaded in the training process and by workers
    wait_for_digits || return 1
    local workers code=0
    for workers in 0 "$WORKERS"; do
        train_demo "$scratch/workers$workers" data.workers=$workers train.max_steps=$([ -n "$quick" ] && echo 2 || echo 60) \
            train.epochs=1 eval.pictures=0 data.check=false > "$scratch/loading.log" 2>&1 || { code=1; tail -n 5 "$scratch/loading.log"; }
        "$python" - "$workers" "$scratch/workers$workers/metrics.jsonl" >> "$out/loading.jsonl" << 'P'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[2])]
print(json.dumps({"workers": int(sys.argv[1]), "step_seconds": [row["step_seconds"] for row in rows if row["kind"] == "train"]}))
P
    done
    cat "$out/loading.jsonl"
    return $code
}

sanitize() {  # not racecheck, which looks at shared memory only: no kernel uses any
    local tool code=0
    for tool in memcheck synccheck; do
        timeout --kill-after=3 "$((ALLOWED / 2))" compute-sanitizer --tool "$tool" --kernel-name kns=detr_bf \
            --error-exitcode 99 --report-api-errors no --print-limit 20 \
            "$python" benchmarks/gpu.py target --device "$device" || { echo "$tool: exit $?"; code=1; }
    done
    return $code
}

profile() {
    BIG=1 ncu --clock-control none --kernel-name-base demangled --kernel-name 'regex:detr_bf::cuda' --launch-count 24 \
        --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats --section Occupancy \
        --section LaunchStats "$python" benchmarks/gpu.py target --device "$device" > "$out/ncu.txt" 2>&1
    local code=$?
    grep -E '_kernel|Duration|L1/TEX Hit|L2 Hit|DRAM Throughput|L2 Cache Throughput|Achieved Occ|Registers Per' "$out/ncu.txt" | head -n 150
    return $code
}

compile() {
    local recipe=rtdetr/rtdetr_r50 side=640 images=16 precision=bf16 rounds=6
    local compared=(train.channels_last=true train.compile=true train.compile=true,train.channels_last=true)
    if [ -n "$quick" ]; then
        recipe=small side=64 images=2 precision=float32 rounds=2 compared=(train.channels_last=true)
    fi
    "$python" benchmarks/step.py --device "$device" --recipe "$recipe" --height $side --width $side --rounds $rounds \
        --batch-sizes $images --precisions $precision --compare "${compared[@]}" --output "$out/compile.json"
}

compare() {  # cells of a comparison that share the GPU; finished cells are kept
    timeout --kill-after=5 $((ALLOWED - 5)) "$python" tools/compare.py run configs/compare/bccd_conditional.yaml \
        --output "$scratch/compare" --jobs "${JOBS:-8}" --discard-weights $quick data.root="$carry/bccd" \
        device="$device" data.workers=1 train.precision=bf16 checkpoint.every_steps=100000
    local code=$?
    tar -C "$scratch" -czf "$out/compare_cells.tgz" --ignore-failed-read compare/cells compare/experiment.json 2> /dev/null
    ls "$scratch/compare/cells" 2> /dev/null | wc -l
    return $code
}

main() {
    echo "phases: $*"
    prepare || { echo "prepare failed"; return 1; }
    export root out carry device quick python scratch JOBS="${JOBS:-8}" WORKERS="${WORKERS:-$([ "$device" = cuda ] && echo 6 || echo 1)}"
    export TEST_PROCESSES="${TEST_PROCESSES:-$([ "$device" = cuda ] && echo 6 || echo 2)}"
    # In the background, meanwhile: the data of the demo, and the kernels of deformops, which it compiles when it is used.
    case " $* " in *" demo "* | *" loading "*)
        (nice timeout "$total" "$python" tools/make_sample_data.py digits --output "$scratch/digits" \
            ${quick:+--num-train 16 --num-val 8}
         touch "$scratch/digits.done") > "$scratch/digits.log" 2>&1 < /dev/null & ;;
    esac
    export DEFORMOPS=$scratch/deformops.done
    case " $* " in *" operators "*)
        (nice timeout "$total" "$python" benchmarks/gpu.py deformops --device "$device" && touch "$DEFORMOPS") \
            > "$scratch/deformops.log" 2>&1 < /dev/null & ;;
    esac
    local name
    for name in "$@"; do
        if [ -n "${limit[$name]:-}" ]; then phase "$name"; else failed+=("$name (unknown phase)"); fi
    done
    say "end"
    if ((${#failed[@]})); then
        printf 'NOT FINE: %s\n' "${failed[@]}"
        return 1
    fi
    echo "all phases are fine"
}

if (($# == 0)); then
    set -- build correct operators steps demo attention inference loading
    [ "$device" = cuda ] && set -- "$@" sanitize profile
    [ -n "$quick" ] && set -- "$@" compile
    [ -n "$quick" ] && [ -d "$carry/bccd" ] && set -- "$@" compare
fi
main "$@" 2>&1 | tee "$out/log.txt"
exit "${PIPESTATUS[0]}"
