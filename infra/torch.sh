#!/usr/bin/env bash
# TORCH=2.14.1 torch.sh PROGRAM [ARGUMENT]...
#
# Runs a program of the environment with that torch, such as `python -m pytest`. It builds the
# environment first: several GB with CUDA, which run on the CPU here. Delete it after use.
# TORCH_WHEEL is what pip installs: TORCH=nightly TORCH_WHEEL="--pre torch".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${TORCH:-}" ] || { echo "error: TORCH is not set, such as TORCH=2.14.1" >&2 && exit 1; }

venv=.venv-torch-$TORCH pins=build/constraints-torch-$TORCH.txt
mkdir -p build
grep -v ^torch= constraints.txt >"$pins"
# shellcheck disable=SC2086  # several words
PIP_CONSTRAINT=$pins infra/venv.sh "$venv" ${TORCH_WHEEL:-torch==$TORCH} -e ".[test]" >&2
exec "$venv/bin/$1" "${@:2}"
