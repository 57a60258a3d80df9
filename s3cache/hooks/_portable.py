"""Make entries portable: leave out the program's files and lines, and what is of one machine.

torch's entries hold the text of each graph, with the line of the user's program that each node is
from, stack traces, and variables of the environment, for logs and for its profiler. None of it is
run. Who may read a bucket need not be one who may read the source.

An entry holds what is run of a Triton kernel: no file, no directory, no bound method. What a kernel
needs of those is made on the machine that reads it (:func:`restore_kernel`), in a directory that no
other user can write to (:func:`check_triton_directory`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from s3cache.artifact import hidden_places
from s3cache.errors import ConfigError
from s3cache.store import Directory, check_way, is_writable_by_others, make_parents
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import (
        CachingAutotuner,
        CudagraphInfo,
        PlaceholderInfo,
        TritonBundle,
        TritonFile,
        TritonKernel,
    )

# In the text of a graph: "# File: /home/me/train.py:7 in forward, code: x = secret(x)", where other
# notes of torch's may come first.
_COMMENT = re.compile(r"^[ \t]*# (?:.*[ \t])?File: .*(?:\n|$)", re.MULTILINE)
# As tracebacks have it, with the line below, and the marks below that.
_LINE = r"[ \t]+{}.*(?:\n|$)"
_FRAME = re.compile(
    r'^[ \t]*File ".*", line \d+.*(?:\n|$)'
    rf"""(?:{_LINE.format('(?!File ")')}(?:{_LINE.format("[~^]+")})?)?""",
    re.MULTILINE,
)
# Nothing but stack traces. torch puts one of the last beside its message where a tangent is wrong.
_TRACES = {"cache_linemap", "inductor_provenance_stack_traces_str", "tangent_source_stack_traces"}
# A program that compiles the graph again, for reports to torch, with variables of the environment.
_PROGRAM = "runnable_graph_str"
_RUN = "source_code"
# What its comments name of the machine: in which file a kernel was written out.
_KERNEL_PATH = re.compile(r"(?<=# kernel path: ).*/")


@contextlib.contextmanager
def portable(*results: object, share_sources: bool = False) -> Iterator[None]:
    """Hide in torch's entries and compiled graphs what is of this machine while the block runs.

    That is where code is from, unless ``share_sources`` is set, and what kernels of Triton name.
    What is set on them meanwhile stays. torch alone can use such kernels as well, but does not
    remember the fastest configuration then.
    """
    changed: list[tuple[dict[str, object], str, object, object]] = []
    try:
        for result in results:
            fields = vars(result)
            for name, value in [*fields.items()]:
                hidden = value
                if name == internals.TRITON_BUNDLE:
                    hidden = _bundle(cast("TritonBundle | None", value), share_sources)
                elif not share_sources:
                    hidden = _hidden(name, value)
                if hidden is not value:
                    fields[name] = hidden
                    changed.append((fields, name, value, hidden))
        yield
    finally:
        for fields, name, value, hidden in changed:
            if fields.get(name) is hidden:
                fields[name] = value


def _hidden(name: str, value: object) -> object:
    if name in _TRACES:
        return None
    if name == _PROGRAM:
        return ""
    if name == "cudagraph_info" and value is not None:
        return _without_traces(cast("CudagraphInfo", value))
    if not isinstance(value, str):
        return value
    return _KERNEL_PATH.sub("", value) if name == _RUN else _text(value)


def _without_traces(info: CudagraphInfo) -> CudagraphInfo:
    return dataclasses.replace(
        info,
        placeholders=[_placeholder(each) for each in info.placeholders],
        stack_traces=[None] * len(info.stack_traces),
        cudagraph_fail_reasons=[_text(each) for each in info.cudagraph_fail_reasons],
    )


def _placeholder(info: PlaceholderInfo) -> PlaceholderInfo:
    users = [_placeholder(user) for user in info.users]
    return dataclasses.replace(info, stack_trace=None, mutating_use_stack_trace=None, users=users)


def _text(text: str) -> str:
    return _FRAME.sub("", _COMMENT.sub("", text))


@functools.cache
def installed_in() -> tuple[str, ...]:
    """Return directories of torch and Python, which compiled code may name."""
    import torch

    found = {str(Path(torch.__file__).parent.parent), sys.prefix, sys.base_prefix}
    return tuple(sorted(found - {"/", "/usr", "/usr/local"}, key=len, reverse=True))


# -- kernels of Triton

# What Triton compiles a kernel through, before it is what the device runs. It can do without
# (TRITON_STORE_BINARY_ONLY); each names the files that the kernel is from.
_STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_GROUP = "__grp__"  # begins the name of the file that lists the others
#: Of a kernel in an entry: under which digest its fastest configuration is remembered.
_CONFIGS = "s3cache_configs"


def _bundle(bundle: TritonBundle | None, share_sources: bool) -> TritonBundle | None:
    """Reduce kernels to what any machine can use."""
    if not bundle or not bundle.kernel_artifacts:
        return bundle
    places = () if share_sources else (*installed_in(), internals.cache_dir.get()())
    autotuners = [
        dataclasses.replace(each, kernel=_without_process(each.kernel))
        for each in bundle.static_autotuners
    ]
    kernels = [_binary(each, places) for each in bundle.kernel_artifacts]
    return dataclasses.replace(bundle, kernel_artifacts=kernels, static_autotuners=autotuners)


def _binary(kernel: TritonKernel, places: Sequence[str]) -> TritonKernel:
    files = [each for each in kernel.artifacts if not each.filename.endswith(_STAGES)]
    names = {each.filename for each in files}
    return dataclasses.replace(
        kernel,
        artifacts=[
            dataclasses.replace(each, payload=hidden_places(_payload(each, names), *places))
            for each in files
        ],
    )


def _payload(file: TritonFile, names: set[str]) -> bytes:
    if not file.filename.startswith(_GROUP):
        return file.payload
    group = json.loads(file.payload)  # a newer Triton takes it for none if a file is not there
    group["child_paths"] = {
        name: path for name, path in group["child_paths"].items() if name in names
    }
    return json.dumps(group).encode()


def _without_process(kernel: CachingAutotuner) -> CachingAutotuner:
    """Return a copy without what belongs to this process; torch refuses to pickle a loaded one."""
    bare, function = object.__new__(type(kernel)), object.__new__(type(kernel.fn))
    vars(function).update(vars(kernel.fn))
    vars(function)[internals.BINDERS] = None
    if internals.FILE in vars(function):
        vars(function)[internals.FILE] = ""
    vars(bare).update(vars(kernel), fn=function, filename=None, save_cache_hook=None)
    vars(bare).update({internals.LAUNCHERS: [], internals.RELOAD: None})
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    if isinstance(cache, internals.autotune_cache.get()):
        vars(bare)[_CONFIGS] = cache.configs_hash
    return bare


def restore_kernel(kernel: CachingAutotuner) -> None:
    """Give a kernel what belongs to this process, as if it had been compiled here."""
    if kernel.filename is not None or not kernel.kernel_hash:
        return  # torch has made it
    kernel.filename = internals.path_of_module.get()(kernel.kernel_hash, "py")[2]
    vars(kernel.fn)[internals.BINDERS] = defaultdict(kernel.fn.create_binder)
    if internals.FILE in vars(kernel.fn):
        vars(kernel.fn)[internals.FILE] = kernel.filename
    configs = vars(kernel).pop(_CONFIGS, None)
    if configs is not None:
        cache = internals.autotune_cache.get().create(
            kernel.inductor_meta, kernel.filename, configs
        )
        kernel.save_cache_hook = cache and cache.save


def check_triton_directory(base: str, kernel: str) -> None:
    """Make ``base`` for this user alone, unless it is there; check the files of a kernel in it."""
    try:
        make_parents(os.path.abspath(base))
        check_way(base)  # before it is opened: from then on the name leads there
        directory = Directory.at(base, make=True)
        # Where no other user gets in, it does not matter what the umask left open within.
        is_private = not os.fstat(directory.fd).st_mode & 0o077
        with contextlib.suppress(FileNotFoundError):  # there is nothing for it yet
            _check_files(directory, kernel, is_private=is_private)
    except ConfigError as exc:
        raise PermissionError(
            errno.EACCES, f"kernels of Triton are not loaded from where others may write: {exc}"
        ) from exc


def _check_files(base: Directory, kernel: str, *, is_private: bool) -> None:
    place = f"{base.path}/{kernel}"
    status = os.stat(kernel, dir_fd=base.fd, follow_symlinks=False)
    _check_ours(status, stat.S_ISDIR, is_private, place)
    fd = os.open(kernel, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=base.fd)
    try:
        for name in os.listdir(fd):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            _check_ours(status, stat.S_ISREG, is_private, f"{place}/{name}")
    finally:
        os.close(fd)


def _check_ours(
    status: os.stat_result, is_kind: Callable[[int], bool], is_private: bool, place: str
) -> None:
    is_ours = is_kind(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or (not is_private and is_writable_by_others(status)):
        raise ConfigError(
            place,
            "is not this user's alone",
            "remove it, or give TRITON_CACHE_DIR another directory",
        )
