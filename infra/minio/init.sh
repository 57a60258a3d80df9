#!/bin/sh
# Makes the bucket with versions, its lifecycle rules, the policies and their users; may be run again.
# Runs in the mc image, which has a POSIX shell and little else.
set -eu

mc alias set local http://minio:9000 "$MINIO_ROOT_USER" "$MINIO_ROOT_PASSWORD" >/dev/null
mc mb --ignore-existing "local/$S3CACHE_BUCKET"
mc version enable "local/$S3CACHE_BUCKET" # policies allow overwriting: versions keep old objects
mc ilm rule import "local/$S3CACHE_BUCKET" </init/lifecycle.json

add_user() { # policy, access key, secret key
  mc admin policy create local "$1" "/init/$1.json"
  mc admin user add local "$2" "$3"
  # attach fails if the policy is attached already, so detach it first
  mc admin policy detach local "$1" --user "$2" >/dev/null 2>&1 || true
  mc admin policy attach local "$1" --user "$2"
}
add_user s3cache-policy "$S3CACHE_WRITER_KEY" "$S3CACHE_WRITER_SECRET"
add_user s3cache-pulls-policy "$S3CACHE_PULLS_KEY" "$S3CACHE_PULLS_SECRET"
add_user s3cache-reader-policy "$S3CACHE_READER_KEY" "$S3CACHE_READER_SECRET"
add_user s3cache-operator-policy "$S3CACHE_OPERATOR_KEY" "$S3CACHE_OPERATOR_SECRET"

echo "ready: $S3CACHE_URL, and $S3CACHE_PULLS_URL for pull requests"
