#!/usr/bin/env bash
# run.sh COMMAND...
#
# Runs COMMAND with a fresh Redis on a free loopback port, always stops the Redis, and ends with
# COMMAND's status. COMMAND finds the URL in S3CACHE_TEST_REDIS_URL. Redis keeps everything in
# memory. torch's own remote caches use it, for comparison; s3cache does not.
#
# Ends with 75 if Redis is not installed and cannot be (see infra/README.md).
set -euo pipefail

[ $# -gt 0 ] || { echo "usage: $0 COMMAND..." >&2 && exit 2; }

CANNOT_INSTALL=75

say() { printf 'redis: %s\n' "$*" >&2; }

install_redis() {
  cannot() { say "cannot install Redis here: $*" && exit "$CANNOT_INSTALL"; }
  command -v apt-get >/dev/null || cannot "there is no apt-get"
  [ "$(id -u)" -eq 0 ] || cannot "not root (run: sudo apt-get install redis-server)"
  say "installing redis-server with apt-get"
  local log
  log=$(mktemp)
  # Where there is an init system, the package starts a service of its own: leave that alone.
  if ! { DEBIAN_FRONTEND=noninteractive timeout 60 apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive timeout 120 \
      apt-get -qq install -y --no-install-recommends redis-server; } >"$log" 2>&1 </dev/null; then
    tail -n 8 "$log" >&2
    rm -f "$log"
    cannot "apt-get failed or took too long"
  fi
  rm -f "$log"
}

command -v redis-server >/dev/null || install_redis

scratch=$(mktemp -d "${TMPDIR:-/tmp}/s3cache-redis.XXXXXX")
pid=
# shellcheck disable=SC2317  # reached through the trap
clean_up() {
  trap '' INT TERM
  [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
  rm -rf -- "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

answers() { # port
  local reply
  exec 3<>"/dev/tcp/127.0.0.1/$1" || return 1
  printf 'PING\r\n' >&3
  IFS= read -r -t 2 reply <&3
  exec 3>&-
  [ "${reply%$'\r'}" = +PONG ]
}

start_redis() {
  local port=$1 tries
  # Its own session, so that Ctrl-C in the terminal reaches COMMAND and not the server.
  setsid redis-server --bind 127.0.0.1 --port "$port" --dir "$scratch" --save '' \
    --appendonly no --daemonize no >"$scratch/log" 2>&1 </dev/null &
  pid=$!
  disown "$pid" # so that the shell does not report its end
  for tries in $(seq 200); do
    kill -0 "$pid" 2>/dev/null || return 1 # the port was taken, most likely
    (answers "$port") 2>/dev/null && return 0
    sleep 0.05
  done
  return 1
}

for attempt in 1 2 3; do
  port=$((31000 + RANDOM % 1000))
  if start_redis "$port"; then break; fi
  say "attempt $attempt of 3 failed"
  [ "$attempt" -lt 3 ] || { tail -n 12 "$scratch/log" >&2 && exit 1; }
done
export S3CACHE_TEST_REDIS_URL=redis://127.0.0.1:$port

status=0
"$@" || status=$?
exit "$status"
