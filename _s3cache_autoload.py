"""What ``import torch`` calls at its end where s3cache is installed.

torch finds it through the entry point group ``torch.backends``. Beside the package and not in it:
a process that names no cache imports this file and nothing else.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CellType, CodeType, FunctionType


#: What ``import torch`` has put where programs may put something else and torch itself looks while
#: it compiles: namespaces, classes and tables by their places. As torch itself left them.
pristine: dict[str, dict[object, object]] = {}


class Insides:
    """What functions were made of when they were added, side by side.

    Lists of what there is in any case, as more objects would cost a look of the garbage collector.
    """

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self.codes: list[CodeType] = []
        self.defaults: list[tuple[object, ...] | None] = []
        self.keywords: list[dict[str, object] | None] = []
        self.in_keywords: list[tuple[object, ...]] = []  # names and values, as those may be written
        # The same of all that have some, one after the other.
        self.filled: list[dict[str, object]] = []
        self.all_names: list[object] = []
        self.all_values: list[object] = []
        self.cells: list[CellType] = []
        self.contents: list[object] = []
        self._seen: set[int] = set()

    def add(self, values: "Iterable[object]") -> None:
        """Those of ``values`` that are functions, and all that they wrap."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind is _Function:
                if id(value) not in self._seen:
                    self._seen.add(id(value))  # it is kept, so nothing else gets its id
                    self._add(value, waiting)  # type: ignore[arg-type]
            elif kind in _HOLDERS:
                waiting.append(value.__func__)  # type: ignore[attr-defined]
            elif kind is property:
                waiting += (value.fget, value.fset, value.fdel)  # type: ignore[attr-defined]

    def _add(self, function: "FunctionType", waiting: list[object]) -> None:
        self.functions.append(function)
        self.codes.append(function.__code__)
        self.defaults.append(function.__defaults__)
        keywords = function.__kwdefaults__
        self.keywords.append(keywords)
        self.in_keywords.append((*keywords, *keywords.values()) if keywords else ())
        if keywords is not None:
            self.filled.append(keywords)
            self.all_names += keywords
            self.all_values += keywords.values()
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                try:
                    content = cell.cell_contents
                except ValueError:  # to be filled
                    continue
                self.cells.append(cell)
                self.contents.append(content)
                waiting.append(content)


_Function = type(Insides.add)
_HOLDERS = (staticmethod, classmethod, type(Insides().add))

#: Of the functions in :data:`pristine`; empty if nobody looked.
insides = Insides()


#: Kernels in Python of torch's own operators, as torch itself left them; empty if nobody looked.
kernels: set[str] = set()

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
PLACES = (*_MODULES.split(), *_OTHERS.split())

_WORDS = {"": None, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def autoload() -> None:
    """Enable s3cache as the environment has it, once something is compiled. Never raises.

    ``S3CACHE_URL`` asks for it; ``S3CACHE_AUTOLOAD`` turns it off, or on without a URL.
    """
    try:  # noqa: SIM105 - contextlib would be one more import
        remember()
    except Exception:  # noqa: BLE001, S110 - of a torch that we do not know: at the first look then
        pass
    switch = os.environ.get("S3CACHE_AUTOLOAD", "").lower()
    wanted = _WORDS.get(switch, False)
    if switch in _WORDS and not (os.environ.get("S3CACHE_URL") if wanted is None else wanted):
        return
    try:  # noqa: SIM105 - as above
        remember_insides()
    except Exception:  # noqa: BLE001, S110 - as above
        pass
    import logging

    logger = logging.getLogger("s3cache")
    try:  # noqa: SIM105 - as above
        import s3cache._logs  # noqa: F401 - who says something is told where nobody set up logging
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
        from s3cache._autoload import wait_for_compiler

        wait_for_compiler(_enable)
    except Exception:
        # torch would make an error of the user's program of it.
        logger.warning("not enabled", exc_info=True)


def remember() -> None:
    """Keep what torch has at all of :data:`PLACES` that are imported by now. Takes 0.2 ms."""
    for place in PLACES:
        module, _, name = place.partition(":")
        owner = sys.modules.get(module)
        found = getattr(owner, name, None) if name else owner
        if found is not None and place not in pristine:
            names = found if isinstance(found, dict) else vars(found)
            pristine[place] = dict(names)  # type: ignore[assignment]  # of names, most of them
    if not kernels:
        kernels.update(getattr(sys.modules.get("torch.library"), "_impls", ()))


def remember_insides() -> None:
    """Keep what the functions in :data:`pristine` are made of. Takes 5 ms."""
    for names in pristine.values():
        insides.add(names.values())


def _enable() -> None:
    from s3cache.hooks import enable_by_environment

    enable_by_environment()
