#!/usr/bin/env bash
# run.sh [ARGUMENTS]: on a machine with Python, torch with CUDA and Triton, and without a network:
# installs what is in wheels/ beside the script, and rehearses. ARGUMENTS are those of rehearse.py.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$here"/wheels/*.whl
PYTHONPATH=$site python3 "$here/rehearse.py" --json "$here/gpu.json" "$@"
