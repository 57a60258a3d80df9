#!/usr/bin/env bash
# Brings the gateway back after a test killed (or stopped) it: same port, same data, new pid.
# The monitor and the object store keep running, so they still have all data.
set -euo pipefail
# shellcheck source=infra/rgw/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

[ -e "$RGW_ENV" ] || { say "nothing was started in $RGW_DIR: run up.sh first" && exit 1; }
# shellcheck source=/dev/null
source "$RGW_ENV"
kill_daemon rgw
start_gateway "$S3CACHE_TEST_RGW_PORT"
