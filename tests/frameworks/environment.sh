#!/usr/bin/env bash
# Builds .venv-frameworks and .venv-vllm. They are separate: users of s3cache have one of these
# packages, never all, and vLLM has a version of its own of most.
# torch comes first, so that no other package chooses its build. torchtune needs a torchao, and Hydra
# an omegaconf, that no other package should have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.venv-frameworks

infra/venv.sh .venv-vllm -c constraints.txt torch
if [ tests/frameworks/vllm.txt -nt .venv-vllm/.complete ]; then
  .venv-vllm/bin/python -m pip install --quiet --no-deps -r tests/frameworks/vllm.txt -e .
  touch .venv-vllm/.complete
fi
infra/venv.sh "$venv" -c constraints.txt torch
for file in "$venv/.ready" pyproject.toml constraints-frameworks.txt; do
  if [ ! -e "$venv/.complete" ] || [ "$file" -nt "$venv/.complete" ]; then stale=yes; fi
done
[ -n "${stale:-}" ] || exit 0
pip() { "$venv/bin/python" -m pip install --quiet "$@"; }
pip -c constraints.txt -c constraints-frameworks.txt -e ".[frameworks]"
pip --no-deps --target "$venv/torchtune" torchtune==0.6.1 torchao==0.14.1
pip --no-deps --target "$venv/hydra" hydra-core==1.3.8 hydra-joblib-launcher==1.2.0 \
  omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 joblib==1.5.3
"$venv/bin/python" -m tests.frameworks.mend
touch "$venv/.complete"
