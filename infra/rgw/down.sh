#!/usr/bin/env bash
# Stops what up.sh started in $S3CACHE_TEST_RGW_DIR and removes that directory, if it exists.
set -euo pipefail
# shellcheck source=infra/rgw/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

[ -e "$RGW_DIR" ] || exit 0
# Remove only a directory that up.sh made, even if the variable names another.
if [ ! -d "$RGW_DIR/log" ] && [ -n "$(ls -A "$RGW_DIR")" ]; then
  say "$RGW_DIR is not a gateway's directory: left alone"
  exit 1
fi
for daemon in rgw osd mon; do
  kill_daemon "$daemon"
done
rm -rf -- "$RGW_DIR"
