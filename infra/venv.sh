#!/usr/bin/env bash
# venv.sh DIRECTORY PIP_ARGUMENT...
#
# Builds a virtual environment with PYTHON, unless there is one that is newer than the pins. Callers
# at once build it one after the other. The stamp is written last: an interrupted build is repeated.
set -euo pipefail
venv=$1
shift
: "${PYTHON:=python3}"

"$PYTHON" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
  echo "error: $PYTHON is missing, older than 3.10 or lacks venv" \
    "(Debian: apt-get install python3-venv); name another with PYTHON=..." >&2
  exit 1
}
exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9; fi
pins=(constraints.txt)
case " $* " in *" -e "*) pins+=(pyproject.toml) ;; esac
for pin in "${pins[@]}"; do
  if [ ! -e "$venv/.ready" ] || [ "$pin" -nt "$venv/.ready" ]; then stale=yes; fi
done
[ -n "${stale:-}" ] || exit 0
echo "building $venv: a minute or two" >&2
"$PYTHON" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "$@"
touch "$venv/.ready"
