#!/usr/bin/env bash
# busy.sh [ARGUMENT]...: run the tests with threads and processes 6 times at once; 7 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

once() {
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
  .venv/bin/python -m pytest -q -p no:cacheprovider --basetemp="$place/t" \
    -m "not slow and not nightly" tests/test_*.py \
    tests/{cache,contract,faults,store,tier,trust,util} "${@:2}" | tail -n 40 | sed "s/^/$1: /"
}
for number in {1..6}; do (once "$number" "$@") & runs+=($!); done
status=0
for run in "${runs[@]}"; do wait "$run" || status=1; done
exit "$status"
