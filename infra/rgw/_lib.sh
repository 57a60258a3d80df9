# shellcheck shell=bash disable=SC2034  # the scripts that source it use its variables
# Shared by the scripts in this directory; sourced, never run.
#
# Settings, all optional, read from the environment:
#   S3CACHE_TEST_RGW_DIR     where the cluster keeps its state       (default: $TMPDIR/s3cache-rgw)
#   S3CACHE_TEST_RGW_PORT    first of a block of 64 loopback ports   (default: 17480)
#   S3CACHE_TEST_RGW_MEMORY  bytes the in-memory object store may hold (default: 2 GiB)

RGW_DIR=${S3CACHE_TEST_RGW_DIR:-${TMPDIR:-/tmp}/s3cache-rgw}
RGW_CONF=$RGW_DIR/ceph.conf
RGW_ENV=$RGW_DIR/env # what a client needs, as `export NAME=value` lines; written last

# sysexits.h has EX_TEMPFAIL = 75: "not here, not now", as opposed to "broken".
CANNOT_INSTALL=75

say() { printf 'rgw: %s\n' "$*" >&2; }

die() { # message
  say "$1"
  local log
  for log in "$RGW_DIR"/log/*; do
    [ -s "$log" ] || continue
    printf -- '--- %s\n' "$log" >&2
    tail -n 12 "$log" >&2
  done
  exit 1
}

# A pid is ours only if its command line names our configuration: pids are used again, and a
# killed process that has not been reaped yet (a zombie) has an empty command line.
is_ours() { # pid
  [ -n "$1" ] && tr '\0' '\n' <"/proc/$1/cmdline" 2>/dev/null | grep -qxF -- "$RGW_CONF"
}

pid_of() { # daemon
  cat "$RGW_DIR/$1.pid" 2>/dev/null || true
}

start_daemon() { # daemon, command...
  local name=$1
  shift
  # Its own session, so that Ctrl-C in the terminal reaches the tests and not the server.
  # 9>&- closes our caller's lock: the daemon would hold it for as long as it lives.
  setsid "$@" >>"$RGW_DIR/log/$name.out" 2>&1 </dev/null 9>&- &
  printf '%s\n' "$!" >"$RGW_DIR/$name.pid"
}

# SIGKILL, because all data are in memory and nothing is kept, and because it also ends a process
# that a test has stopped with SIGSTOP.
kill_daemon() { # daemon
  local pid tries
  pid=$(pid_of "$1")
  is_ours "$pid" || return 0
  kill -KILL "$pid" 2>/dev/null || true
  for tries in $(seq 100); do
    is_ours "$pid" || return 0
    sleep 0.05
  done
  say "$1 (pid $pid) survived SIGKILL for 5 s"
  return 1
}

port_is_free() { # port
  ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

answers_http() { # port
  local status
  exec 3<>"/dev/tcp/127.0.0.1/$1" || return 1
  printf 'GET / HTTP/1.0\r\n\r\n' >&3
  IFS= read -r -t 2 status <&3 || return 1
  case $status in "HTTP/1."?" 200"*) return 0 ;; *) return 1 ;; esac
}

start_gateway() { # port
  local tries
  start_daemon rgw radosgw -c "$RGW_CONF" -n client.rgw -f
  for tries in $(seq 600); do
    if (answers_http "$1") 2>/dev/null; then return 0; fi
    is_ours "$(pid_of rgw)" || [ "$tries" -lt 20 ] || die "radosgw ended while starting"
    sleep 0.05
  done
  die "radosgw does not answer on 127.0.0.1:$1 after 30 s"
}
