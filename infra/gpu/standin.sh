#!/usr/bin/env bash
# standin.sh [ARGUMENT]...: `make test-gpu` without a GPU, and faults of GPUs.
#
# A driver and a runtime that do nothing are under CUDA's build of torch (5 GB), of version TORCH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export TORCH=${TORCH:-2.15.0} REHEARSAL_LIMIT_S=1800

infra/torch.sh python -m pip install --quiet --no-deps nvidia-cuda-crt==13.5.37
infra/torch.sh python infra/gpu/rehearse.py --standin infra/gpu/h100.json \
  --json "build/gpu-$TORCH.json" "$@"
infra/torch.sh python infra/gpu/rehearse.py --standin infra/gpu/h100.json --warm \
  --json "build/warm-$TORCH.json" "$@"
infra/torch.sh python tests/features/target/faults.py infra/gpu/h100.json
