#!/usr/bin/env bash
# run.sh [ARGUMENT]...: fuzz the frame decoder, then the signature checks, for FUZZ_TIME seconds (60)
# each. The environment is separate: atheris has wheels for few Pythons, and needs no torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

infra/venv.sh .venv-fuzz -c constraints.txt -r tests/fuzz/requirements.txt
mkdir -p build/fuzz
for target in frame signed; do
  fuzz=(.venv-fuzz/bin/python tests/fuzz/fuzz.py "$target")
  PYTHONPATH=. "${fuzz[@]}" --write-seeds "build/fuzz/$target"
  PYTHONPATH=. "${fuzz[@]}" "-max_total_time=${FUZZ_TIME:-60}" -artifact_prefix=build/fuzz/ "$@" \
    "build/fuzz/$target"
done
