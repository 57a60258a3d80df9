#!/usr/bin/env bash
# Starts a Ceph RADOS Gateway on loopback: one monitor, one object store in memory, one gateway.
# It is real Ceph with real S3 semantics and nothing on disk worth keeping; see infra/README.md.
#
# Settings: see _lib.sh. Ends with 0 when the gateway answers (its settings are then in
# $S3CACHE_TEST_RGW_DIR/env, and `up.sh` again changes nothing), 75 if Ceph is not installed
# and cannot be, 1 if something failed. down.sh stops it.
set -euo pipefail
# shellcheck source=infra/rgw/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

PORT=${S3CACHE_TEST_RGW_PORT:-17480}
TLS_PORT=$((PORT + 1))
MON_PORT=$((PORT + 2))
MEMORY=${S3CACHE_TEST_RGW_MEMORY:-2147483648}
ACCESS_KEY=testaccess
SECRET_KEY=testsecretkey1234
PACKAGES=(ceph-mon ceph-osd radosgw openssl)

is_installed() {
  local program
  for program in ceph ceph-mon ceph-osd ceph-authtool monmaptool radosgw radosgw-admin openssl; do
    command -v "$program" >/dev/null || return 1
  done
}

# Bounded, so that a machine without a network skips its tests instead of hanging.
apt_get() { # seconds, arguments...
  local limit_s=$1
  shift
  DEBIAN_FRONTEND=noninteractive timeout --kill-after=10 "$limit_s" \
    apt-get -o "DPkg::Lock::Timeout=$limit_s" -qq "$@"
}

install_ceph() {
  cannot() { say "cannot install Ceph here: $*" && exit "$CANNOT_INSTALL"; }
  command -v apt-get >/dev/null || cannot "there is no apt-get"
  [ "$(id -u)" -eq 0 ] || cannot "not root (run: sudo apt-get install ${PACKAGES[*]})"
  say "installing ${PACKAGES[*]} with apt-get; about a minute"
  local log
  log=$(mktemp)
  if ! { apt_get 60 update && apt_get 240 install -y --no-install-recommends "${PACKAGES[@]}"; } \
    >"$log" 2>&1 </dev/null; then
    tail -n 8 "$log" >&2
    rm -f "$log"
    cannot "apt-get failed or took too long"
  fi
  rm -f "$log"
  is_installed || cannot "apt-get succeeded but some of its programs are not on PATH"
}

write_certificate() {
  # keyUsage: Python 3.13 and newer verify strictly and refuse a root certificate without it.
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 7 \
    -subj "/CN=s3cache test gateway" -addext "subjectAltName=IP:127.0.0.1,DNS:localhost" \
    -addext "keyUsage=critical,digitalSignature,keyCertSign" \
    -keyout "$RGW_DIR/tls.key" -out "$RGW_DIR/tls.pem" 2>"$RGW_DIR/log/openssl.out" ||
    die "openssl could not write a certificate"
}

write_configuration() {
  cat >"$RGW_CONF" <<CONF
[global]
fsid = $1
mon host = v2:127.0.0.1:$MON_PORT
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
ms bind port min = $((PORT + 8))
ms bind port max = $((PORT + 63))

# One machine, one user, a few minutes: no authentication between the daemons. The gateway would
# still insist on an encrypted channel to the monitor, which needs authentication; so allow crc.
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc secure

run dir = $RGW_DIR/run
admin socket = $RGW_DIR/run/\$name.\$pid.asok
log file = $RGW_DIR/log/\$name.log
crash dir = $RGW_DIR/crash
keyring = $RGW_DIR/keyring

# One copy of everything, as there is one object store.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000

# The monitor batches map changes for 1 s. Starting makes a dozen, one after another.
paxos propose interval = 0.02
paxos min wait = 0.01

[mon.a]
mon data = $RGW_DIR/mon
# Start on a machine with a nearly full disk too: the data are in memory.
mon data avail crit = 0

[osd.0]
osd data = $RGW_DIR/osd
osd objectstore = memstore
memstore device bytes = $MEMORY
osd class load list = *
osd class default list = *
# A killed gateway's watches would otherwise hold up its successor's writes for 30 s.
osd client watch timeout = 2

[client.rgw]
rgw frontends = beast tcp_nodelay=1 endpoint=127.0.0.1:$PORT ssl_endpoint=127.0.0.1:$TLS_PORT ssl_certificate=$RGW_DIR/tls.pem ssl_private_key=$RGW_DIR/tls.key
rgw thread pool size = 32
rgw enable apis = s3
# Free deleted objects' memory within seconds, not hours.
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
CONF
}

write_keyring() {
  local name
  : >"$RGW_DIR/keyring"
  for name in mon. client.admin client.rgw; do
    ceph-authtool "$RGW_DIR/keyring" -n "$name" --gen-key \
      --cap mon 'allow *' --cap osd 'allow *' >/dev/null
  done
}

start_cluster() {
  local fsid osd_id
  fsid=$(cat /proc/sys/kernel/random/uuid)
  osd_id=$(cat /proc/sys/kernel/random/uuid)
  mkdir -p "$RGW_DIR"/{mon,osd,run,log,crash}
  write_certificate
  write_configuration "$fsid"
  write_keyring

  monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$MON_PORT]" "$RGW_DIR/monmap" \
    >"$RGW_DIR/log/monmap.out" 2>&1 || die "the monitor map could not be made"
  ceph-mon -c "$RGW_CONF" -i a --mkfs --monmap "$RGW_DIR/monmap" --keyring "$RGW_DIR/keyring" \
    >"$RGW_DIR/log/mon-mkfs.out" 2>&1 || die "the monitor's store could not be made"
  start_daemon mon ceph-mon -c "$RGW_CONF" -i a -f
  timeout 30 ceph -c "$RGW_CONF" osd new "$osd_id" >"$RGW_DIR/log/osd-new.out" 2>&1 ||
    die "the monitor does not answer"

  ceph-osd -c "$RGW_CONF" -i 0 --mkfs --osd-uuid "$osd_id" >"$RGW_DIR/log/osd-mkfs.out" 2>&1 ||
    die "the object store could not be made"
  start_daemon osd ceph-osd -c "$RGW_CONF" -i 0 -f

  timeout 60 radosgw-admin -c "$RGW_CONF" user create --uid test --display-name test \
    --access-key "$ACCESS_KEY" --secret-key "$SECRET_KEY" >"$RGW_DIR/log/user.out" 2>&1 ||
    die "the S3 user could not be made"
  start_gateway "$PORT"
}

write_environment() {
  # Under another name first: a reader sees the whole file or none.
  {
    printf 'export S3CACHE_TEST_RGW_DIR=%q\n' "$RGW_DIR"
    printf 'export S3CACHE_TEST_RGW_PORT=%q\n' "$PORT"
    printf 'export S3CACHE_TEST_RGW_ENDPOINT=%q\n' "http://127.0.0.1:$PORT"
    printf 'export S3CACHE_TEST_RGW_TLS_ENDPOINT=%q\n' "https://127.0.0.1:$TLS_PORT"
    printf 'export S3CACHE_TEST_RGW_TLS_CA=%q\n' "$RGW_DIR/tls.pem"
    printf 'export S3CACHE_TEST_RGW_ACCESS_KEY=%q\n' "$ACCESS_KEY"
    printf 'export S3CACHE_TEST_RGW_SECRET_KEY=%q\n' "$SECRET_KEY"
    printf 'export S3CACHE_TEST_RGW_PIDFILE=%q\n' "$RGW_DIR/rgw.pid"
  } >"$RGW_ENV.new"
  mv "$RGW_ENV.new" "$RGW_ENV"
}

case $RGW_DIR in
  *[[:space:]]*) say "S3CACHE_TEST_RGW_DIR=$RGW_DIR holds white space, which Ceph cannot read" && exit 1 ;;
  /*) ;;
  *) say "S3CACHE_TEST_RGW_DIR=$RGW_DIR is not an absolute path" && exit 1 ;;
esac
if [ -e "$RGW_ENV" ] && is_ours "$(pid_of rgw)"; then
  say "already running, see $RGW_ENV"
  exit 0
fi
if [ -e "$RGW_DIR" ] && [ -n "$(ls -A "$RGW_DIR")" ]; then
  say "$RGW_DIR is not empty and no gateway runs there: remove it, or run down.sh if one did"
  exit 1
fi
is_installed || install_ceph
for port in "$PORT" "$TLS_PORT" "$MON_PORT"; do
  port_is_free "$port" || { say "127.0.0.1:$port is in use: set S3CACHE_TEST_RGW_PORT" && exit 1; }
done
start_cluster
write_environment
say "ready in $SECONDS s at http://127.0.0.1:$PORT; for its settings: source $RGW_ENV"
