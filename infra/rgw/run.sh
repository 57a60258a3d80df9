#!/usr/bin/env bash
# run.sh [--if-possible] COMMAND...
#
# Runs COMMAND with a fresh gateway on free loopback ports, always stops the gateway, and ends
# with COMMAND's status. COMMAND finds in its environment:
#   S3CACHE_TEST_RGW_ENDPOINT, _ACCESS_KEY, _SECRET_KEY      the gateway and a user who owns buckets
#   S3CACHE_TEST_RGW_TLS_ENDPOINT, _TLS_CA                   the same over https, and its certificate
#   S3CACHE_TEST_RGW_PIDFILE                                 radosgw's pid, for SIGKILL and SIGSTOP
#   S3CACHE_TEST_RGW_DIR                                     for restart.sh after a SIGKILL
#
# --if-possible: if Ceph is not installed and cannot be, run COMMAND without those variables
# (its tests then skip, and say so). S3CACHE_TEST_RGW=off does the same without an attempt.
# A gateway that is installed and does not start is a failure in any case.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if_possible=
if [ "${1:-}" = --if-possible ]; then
  if_possible=yes
  shift
fi
[ $# -gt 0 ] || { echo "usage: $0 [--if-possible] COMMAND..." >&2 && exit 2; }

forget_gateway() {
  unset S3CACHE_TEST_RGW_{ENDPOINT,TLS_ENDPOINT,TLS_CA,ACCESS_KEY,SECRET_KEY,PIDFILE,DIR,PORT}
}
# A leftover variable of the caller must not lead tests to another server.
forget_gateway

without_gateway() {
  forget_gateway
  echo "run.sh: running without a gateway: its tests will be skipped" >&2
  exec "$@"
}
if [ "${S3CACHE_TEST_RGW:-}" = off ]; then
  [ -z "$if_possible" ] || without_gateway "$@"
  echo "run.sh: S3CACHE_TEST_RGW=off, but this command needs the gateway" >&2
  exit 2
fi

scratch=$(mktemp -d "${TMPDIR:-/tmp}/s3cache-rgw.XXXXXX")
export S3CACHE_TEST_RGW_DIR=$scratch/rgw
# shellcheck disable=SC2317  # reached through the trap
clean_up() {
  trap '' INT TERM # a second Ctrl-C must not leave servers behind
  "$here/down.sh" || true
  rm -rf -- "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Nothing can trap SIGKILL: another process watches this script and cleans up after it.
(
  trap '' INT
  while kill -0 $$; do sleep 1; done
  "$here/down.sh"
  rm -rf -- "$scratch"
) >/dev/null 2>&1 </dev/null &

# Blocks of 64 ports below the range that the kernel hands out for outgoing connections. Another
# run may take the same block between our check and our start: then try another.
for attempt in 1 2 3; do
  export S3CACHE_TEST_RGW_PORT=$((20000 + RANDOM % 180 * 64))
  status=0
  "$here/up.sh" || status=$?
  [ "$status" -eq 1 ] || break
  echo "run.sh: attempt $attempt of 3 failed" >&2
  "$here/down.sh"
done
case $status in
  0) ;;
  75) [ -z "$if_possible" ] || { trap - EXIT && rm -rf -- "$scratch" && without_gateway "$@"; }
    exit 75 ;;
  *) exit "$status" ;;
esac
# shellcheck source=/dev/null
source "$S3CACHE_TEST_RGW_DIR/env"

status=0
"$@" || status=$?
exit "$status"
