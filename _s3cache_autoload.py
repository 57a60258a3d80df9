"""What ``import torch`` calls at its end where s3cache is installed.

torch finds it through the entry point group ``torch.backends``. Beside the package and not in it:
a process that names no cache imports this file and nothing else.
"""

import os
import sys

TYPE_CHECKING = False  # to mypy it is true; typing would be one more import
if TYPE_CHECKING:
    from collections.abc import Callable

#: What ``import torch`` itself has put where programs may put something else and torch looks while
#: it compiles: namespaces, classes and tables by their places, each as a copy.
baseline: dict[str, dict[object, object]] = {}

# Here and not with the other names of torch's: to import those takes longer than all of this.
_MODULES = """
    torch torch.functional torch.nn.functional torch._VF torch._C._nn torch._C._linalg
    torch._C._fft torch._C._special torch._C._sparse torch._C._nested torch.linalg torch.fft
    torch.special torch.sparse torch.nested torch._tensor torch._decomp.decompositions
    torch._decomp torch._refs torch._refs.nn.functional torch._refs.linalg torch._refs.fft
    torch._refs.special torch._refs._conversions torch._prims torch._prims.rng_prims
    torch._prims_common torch._prims_common.wrappers torch._meta_registrations
    torch._subclasses.fake_impls cmath math operator
"""
_OTHERS = """
    torch:Tensor torch.nn:Parameter torch._decomp:decomposition_table torch._decomp:meta_table
    torch._decomp:pre_autograd_decomposition_table
    torch._subclasses.fake_impls:op_implementations_dict
"""
#: Operators and keys for which torch has a kernel in Python.
KERNELS = "torch.library:_impls"
PLACES = (*_MODULES.split(), *_OTHERS.split())

#: The modules of which the first import means that something will be compiled, or that a program
#: loads artifacts into torch's own caches, which a policy may forbid.
COMPILER, CODE_CACHES = "torch._inductor.compile_fx", "torch._inductor.codecache"

_WORDS = {"": None, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_is_waiting = _is_cancelled = False
_withdraw: "list[Callable[[], None]]" = []  # functions that each call off one wait for an import


def autoload() -> None:
    """Enable s3cache as the environment has it, once something is compiled. Never raises.

    ``S3CACHE_URL`` asks for it; ``S3CACHE_AUTOLOAD`` turns it off, or on without a URL.
    """
    global _is_waiting, _withdraw
    try:  # noqa: SIM105 - contextlib would be one more import
        take_baseline()
    except Exception:  # noqa: BLE001, S110 - of a torch that we do not know: at the first look then
        pass
    switch = os.environ.get("S3CACHE_AUTOLOAD", "").lower()
    wanted = _WORDS.get(switch, False)
    if switch in _WORDS and not (os.environ.get("S3CACHE_URL") if wanted is None else wanted):
        return
    import logging

    logger = logging.getLogger("s3cache")
    try:  # noqa: SIM105 - as above
        import s3cache.util.logs  # noqa: F401 - shows warnings where no logging is set up
    except Exception:  # noqa: BLE001, S110 - it is met again below
        pass
    if switch not in _WORDS:
        logger.warning(
            "not enabled: environment variable S3CACHE_AUTOLOAD: "
            "%r is no truth value: use true or false",
            switch,
        )
        return
    try:
        from s3cache.util.importing import before_import
        from s3cache.util.snapshot import FUNCTIONS

        for names in baseline.values():
            FUNCTIONS.add(names.values())  # takes 5 ms
        # Most processes of a job compile nothing: launchers, workers that load data. They come no
        # further than this, and pay nothing for the rest.
        if not _is_cancelled:
            _is_waiting = True
            _withdraw += [before_import(module, enable_now) for module in (COMPILER, CODE_CACHES)]
    except Exception:
        # torch would make an error of the user's program of it.
        logger.warning("not enabled", exc_info=True)


def enable_if_asked() -> None:
    """Enable the cache now if the environment asks for one, also before ``import torch``."""
    by_torch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if by_torch and not _is_cancelled and "torch" not in sys.modules:
        autoload()
    enable_now()


def enable_now() -> None:
    """Enable the cache if that is still waiting, and the process is not ending already."""
    import threading

    if _is_waiting and threading.main_thread().is_alive():
        _stop_waiting()
        from s3cache.hooks import enable_by_environment

        enable_by_environment()


def cancel() -> None:
    """Leave the choice to the program, which has made one: the environment has no say any more."""
    global _is_cancelled
    _is_cancelled = True
    _stop_waiting()


def _stop_waiting() -> None:
    global _is_waiting
    _is_waiting = False
    while _withdraw:
        _withdraw.pop()()


def take_baseline() -> None:
    """Copy what torch has at all places that are imported by now. Takes 0.2 ms."""
    for place in (*PLACES, KERNELS):
        module, _, name = place.partition(":")
        owner = sys.modules.get(module)
        found = getattr(owner, name, None) if name else owner
        if found is not None and place not in baseline:
            if isinstance(found, set):
                found = dict.fromkeys(found)
            names = found if isinstance(found, dict) else vars(found)
            baseline[place] = dict(names)  # type: ignore[assignment]  # of names, most of them
