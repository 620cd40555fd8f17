#!/usr/bin/env bash
# Checks and timings that need a GPU: correctness of the operators, compute-sanitizer, then the benchmark tables.
#
#     benchmarks/gpu.sh [FOLDER]      results go to FOLDER (default runs/gpu); PYTHON selects the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${1:-runs/gpu}
mkdir -p "$out"

"$python" -m detr_bf.ops build --strict
"$python" -m detr_bf.ops
"$python" -m pytest -q tests/ops/test_ms_deform_attn_cuda.py tests/ops/test_batch_attention.py tests/ops/test_dropout.py
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m detr_bf.ops
done

for dtype in float32 bfloat16; do
    "$python" benchmarks/ms_deform_attn.py --device cuda --dtype "$dtype" --rounds 50 --output "$out/ms_deform_attn_$dtype.json"
    "$python" benchmarks/batch_attention.py --device cuda --dtype "$dtype" --rounds 50 --output "$out/batch_attention_$dtype.json"
done
"$python" benchmarks/kernels.py --device cuda --rounds 24 --output "$out/kernels.json"
"$python" benchmarks/plugins.py --device cuda --rounds 50 --output "$out/plugins.json" train.precision=bf16
for recipe in detr/detr_r50_bfv2 deformable_detr/deformable_detr_r50_bfv2; do
    name=${recipe##*/}
    "$python" benchmarks/step.py --device cuda --recipe "$recipe" --batch-sizes 2 4 8 16 --precisions float32 bf16 fp16 \
        --output "$out/step_$name.json"
    "$python" benchmarks/step.py --device cuda --recipe "$recipe" --batch-sizes 2 8 --precisions float32 bf16 \
        --compare train.compile=true train.channels_last=true train.recompute_encoder=true \
        train.compile=true,train.channels_last=true --output "$out/compare_$name.json"
done
