#!/usr/bin/env bash
# run.sh [ARGUMENTS]: installs the wheels in wheels/ beside this script, and runs rehearse.py with
# ARGUMENTS. The machine needs Python, torch with CUDA and Triton, and no network.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$here"/wheels/*.whl
PYTHONPATH=$site python3 "$here/rehearse.py" --json "$here/gpu.json" "$@"
