#!/usr/bin/env bash
# Installs Triton and Helion for the tests that compile for an absent GPU: 1 GB in .venv-triton. Not
# in .venv, where torch would find Triton. If they are not available, the tests skip; in CI they fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
triton=3.9.0 helion=1.5.1
venv=.venv-triton

exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9; fi
install() {
  echo "installing $1 into $venv" >&2
  .venv/bin/python -m pip install --quiet --no-deps --target "$venv/site" "$1"
}
if [ ! -e "$venv/.ready-$triton" ]; then
  rm -rf "$venv"
  mkdir "$venv"
  install "triton==$triton" || { echo "note: no Triton, so tests/gpu skips" >&2 && exit 0; }
  touch "$venv/.ready-$triton"
fi
# Its requirements are for searches, which no test runs.
if [ ! -e "$venv/.helion-$helion" ]; then
  install "helion==$helion" || { echo "note: no Helion, so its tests skip" >&2 && exit 0; }
  touch "$venv/.helion-$helion"
fi
