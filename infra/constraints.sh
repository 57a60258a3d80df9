#!/usr/bin/env bash
# Resolves the dependencies again and writes constraints.txt. torch stays at its pinned version: a
# newer one is a separate change.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rm -rf build/constraints
"${PYTHON:-python3}" -m venv build/constraints
build/constraints/bin/python -m pip install --quiet -e '.[dev]' packaging \
  -r infra/dist/requirements.txt -r infra/docs/requirements.txt -r tests/fuzz/requirements.txt \
  "$(grep '^torch==' constraints.txt)"
build/constraints/bin/python infra/constraints.py >build/constraints.txt
mv build/constraints.txt constraints.txt
