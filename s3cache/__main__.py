"""``python -m s3cache run train.py ...``: run a program with the cache turned on, unchanged.

``python -m s3cache keygen NAME``: make a key that signs entries, and one to trust.

Also ``run -m module ...``, ``run -c code ...`` and ``run - ...``. The processes that the program
starts have the cache too: ``run -m torch.distributed.run ... train.py`` and ``torchrun ... -m
s3cache run train.py`` come to the same.
"""

from __future__ import annotations

import argparse
import os
import sys

from s3cache._programs import run_command, run_input, run_module, run_path
from s3cache.errors import ConfigError


def main(arguments: list[str]) -> None:
    """Do what the arguments say; bad ones end the program with status 2 and one clear error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "program" not in options:
        try:
            keygen(options.name, options.to or f"{options.name}.key", shared=options.shared)
        except ConfigError as exc:
            parser.error(str(exc))
        return
    if not options.program:
        kind = "module" if options.module else "code" if options.command else "script"
        parser.error(f"there is no {kind} to run")
    program = options.program
    run = run_module if options.module else run_command if options.command else run_path
    if run is run_path and program[0] == "-":
        run = run_input
    elif run is run_path and not os.path.exists(program[0]):
        parser.error(f"script {program[0]}: no such file")
    try:
        _enable(options.url)
    except ConfigError as exc:
        parser.error(str(exc))
    run(program)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m s3cache",
        description="A shared compile cache for torch.compile.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a Python program with s3cache turned on",
        epilog="Without --url the environment says where the cache is: S3CACHE_URL. Other settings "
        "come from there too: S3CACHE_*. Each process that compiles ends with one line of what hit "
        "and missed (S3CACHE_SUMMARY=0: none).",
        allow_abbrev=False,
    )
    run.add_argument("--url", help="where the cache is, such as s3://bucket/prefix")
    kinds = run.add_mutually_exclusive_group()
    kinds.add_argument("-m", dest="module", action="store_true", help="a module, not a script")
    kinds.add_argument("-c", dest="command", action="store_true", help="code, not a script")
    run.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="what python runs too: a script, a .pyc, a directory or zip file with a __main__, '-' "
        "for standard input; and arguments for it, which are passed on as they are",
    )
    key = commands.add_parser(
        "keygen",
        help="make a key that signs entries, and the public key to trust",
        epilog="The secret key goes to a file that only you can read. Printed are the settings of "
        "those who save and of those who read.",
        allow_abbrev=False,
    )
    key.add_argument("name", help="of the key, such as ci-main-1: readers see it")
    key.add_argument("--to", metavar="FILE", help="for the secret key (NAME.key)")
    key.add_argument(
        "--shared",
        action="store_true",
        help="one secret for all, who trust each other and all may save",
    )
    return parser


def keygen(name: str, path: str, *, shared: bool) -> None:
    """Write a new key to ``path``, which must not exist, and print the settings that use it.

    Raises:
        ConfigError: the name cannot be one, or the file cannot be made.
    """
    from s3cache.trust import Algorithm, VerifyKey, generate

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
    sys.stdout.write(
        f"S3CACHE_SIGNING_KEY={file_name}  # where entries are saved\n"
        f'S3CACHE_TRUSTED_KEYS="{trusted}"  # where they are read\n'
        f"# to revoke it: S3CACHE_REVOKED={VerifyKey.parse(key.public_text()).fingerprint}\n"
    )


def _enable(url: str | None) -> None:
    """Here, and by the environment in every process that this one starts."""
    from s3cache.hooks import enable

    if url is not None:
        os.environ["S3CACHE_URL"] = url
    os.environ.setdefault("S3CACHE_AUTOLOAD", "1")  # without a URL too
    os.environ.setdefault("S3CACHE_SUMMARY", "1")
    enable()


if __name__ == "__main__":
    main(sys.argv[1:])
