"""``s3cache keygen NAME``: a key that signs entries, and one to trust."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Optional

import typer

from s3cache.cli._groups import grouped
from s3cache.cli._output import Output
from s3cache.errors import ConfigError

__all__ = ["keygen"]


@grouped(out=Output)
def keygen(
    out: Output,
    name: Annotated[str, typer.Argument(help="Of the key, such as ci-main-1: readers see it.")],
    to: Annotated[
        Optional[str],  # noqa: UP045 - Typer reads it while the program runs, in Python 3.10 too
        typer.Option(metavar="FILE", help="For the secret key.", show_default="NAME.key"),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="One secret for all, who trust each other and may all save."),
    ] = False,
) -> None:
    """Make a key that signs entries, and the public key to trust.

    The secret key goes to a file that only you can read. Printed are the settings of those who
    save and of those who read.
    """
    from s3cache.trust import Algorithm, VerifyKey, generate

    path = to or f"{name}.key"
    key = generate(name, Algorithm.HMAC_SHA256 if shared else Algorithm.ED25519)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"key file {path}", f"cannot be made ({exc.strerror})", "name another"
        ) from None
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)  # whatever the umask
        file.write(f"{key.secret_text()}\n")
    file_name = os.path.abspath(path)
    trusted = f"$(cat {file_name})" if shared else key.public_text()
    fingerprint = VerifyKey.parse(key.public_text()).fingerprint
    if out.json:
        public = None if shared else key.public_text()
        out.record({"signing_key": file_name, "trusted_key": public, "fingerprint": fingerprint})
        return
    sys.stdout.write(
        f"S3CACHE_SIGNING_KEY={file_name}  # where entries are saved\n"
        f'S3CACHE_TRUSTED_KEYS="{trusted}"  # where they are read\n'
        f"# to revoke it: S3CACHE_REVOKED={fingerprint}\n"
    )
