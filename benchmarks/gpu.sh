#!/usr/bin/env bash
# All benchmarks in one go: on the GPU where there is one, else on the CPU with fewer layers and repeats. Under five minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    step=(--device cuda --repeats 20) memory=(--device cuda) loop=(--device cuda)
else
    step=(--layers 2 --repeats 5) memory=(--presets 16m,125m) loop=(--sequences 1)
fi
"$python" benchmarks/step.py --preset 125m --round "${step[@]}" "$@"
echo
"$python" benchmarks/step.py --preset 720m --layers 1 "${step[@]:2}" "$@"
echo
"$python" benchmarks/memory.py "${memory[@]}" "$@"
echo
"$python" benchmarks/sync.py --layers 1 --repeats 5 "$@"
echo
"$python" benchmarks/loop.py --steps 10 "${loop[@]}" "$@"
