#!/usr/bin/env bash
# Writes build/gpu-bundle.tar: wheels and the script of `make test-gpu`, for a machine without a
# network that has Python 3.12, torch 2.11.0+cu130 and Triton 3.6.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bundle=build/gpu-bundle

infra/venv.sh .venv-dist -c constraints.txt -r infra/dist/requirements.txt
rm -rf "$bundle" "$bundle.tar"
mkdir -p "$bundle/wheels"
.venv-dist/bin/python -m build --no-isolation --wheel --outdir "$bundle/wheels" .
.venv-dist/bin/python -m pip download --quiet --no-deps -c constraints.txt \
  --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
  --only-binary :all: --dest "$bundle/wheels" msgpack tenacity zstandard
cp infra/gpu/rehearse.py infra/gpu/run.sh "$bundle"
tar -C build -cf "$bundle.tar" gpu-bundle
du -h "$bundle.tar"
