"""The seam between the core and its features.

A feature is declared in the ``__init__`` of its folder in ``s3cache/features/``, which costs a
fraction of a millisecond. Its code is imported only where the feature is in use. A feature that
cannot be imported is not there. A feature that fails is off alone, with one warning; strict mode
raises the error. docs/architecture.md describes the core and its features.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

from s3cache.errors import MissError, Reason
from s3cache.util.logs import logger_of
from s3cache.util.text import PAGES

P = ParamSpec("P")
R = TypeVar("R")

logger = logger_of()


@dataclass(frozen=True)
class NoOptions:
    """The options of a feature that has none."""


@dataclass(frozen=True)
class JobOption:
    """An option of ``s3cache warm`` that changes the environment in which the job runs.

    ``environment`` names a function: a context manager that gets the value of the option, and
    yields environment variables for the job, ``None`` for those that it must not have.
    """

    name: str
    metavar: str
    help: str
    environment: str


@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process.

    Attributes:
        word: what a process of its jobs is called.
        number: of this process in its job; ``""`` if no launcher has started it.
        job: equal in all processes of the job, and perhaps in those of a later job.
    """

    word: str = ""
    number: str = ""
    job: str = ""

    @property
    def name(self) -> str:
        """Return the name of this process in its job; ``""`` without a job."""
        return f"{self.word} {self.number}" if self.number else ""


@dataclass(frozen=True)
class Launcher:
    """The environment variables that a launcher sets in each process of a job.

    Attributes:
        word: what a process is called.
        number: has the number of the process.
        job: are equal in all processes of the job, and perhaps in those of a later job.
    """

    word: str
    number: str
    job: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What the core knows of a feature. Functions are named like entry points, ``module:name``.

    Attributes:
        name: of its folder, of its tests, and in warnings.
        does: what is off without it, for warnings: ``sharing files of other compilers``.
        options: a dataclass of its settings, declared with :func:`s3cache.util.options.option`.
        is_used: whether these :class:`~s3cache.settings.Settings` use it.
        kinds: the kinds of its entries. Lookups are counted for each kind.
        hints: prefixes of keys of its entries that name other entries. They are not counted, and
            given up where they may not be uploaded.
        reasons: of misses, made with ``Reason.declare``.
        bypasses: the codes of its reasons not to cache a graph.
        codes: why it was not used; ``page``, of the documentation, has a section on each.
        counts: the names of its other counts. A count with a label is ``name:label``.
        events: the names of its other events in records, each with the title of a lane in a trace.
            An outcome of these may end with ``for PID@HOST``.
        reports: gets runs; returns data for a report, and lines. It may read what the feature left
            in ``Record.notes``.
        in_words: describes its counts in the summary.
        launcher: the launcher that the feature knows.
        waits: called at the end of ``import torch`` if the environment names a cache; returns a
            function that stops waiting.
        begins: called with each :class:`~s3cache.cache.Engine` that opens, and again in a fork; its
            result is in ``Engine.parts``, by the feature's name.
        installs: called with each session, the replaced functions of torch and the engine.
        torch: the module that declares its names of torch; see ``s3cache.torch_api``.
        variables: its environment variables that are not options, without ``S3CACHE_``.
        commands: its commands: functions that return plain data, which the command line shows.
        job_options: its options of ``s3cache warm``.
        testing: variables of the machines of ``s3cache.testing``, by name.
    """

    name: str
    does: str
    options: type = NoOptions
    kinds: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    bypasses: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    page: str = ""
    counts: tuple[str, ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    reports: str = ""
    in_words: Callable[[Mapping[str, float]], str] = lambda _: ""
    is_used: Callable[[Any], bool] = lambda _: True
    launcher: Launcher | None = None
    waits: str = ""
    begins: str = ""
    installs: str = ""
    torch: str = ""
    variables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    job_options: tuple[JobOption, ...] = ()
    testing: tuple[tuple[str, str], ...] = ()

    def call(self, function: str, *args: object, strict: bool = False) -> Any:
        """Call one of the feature's functions, if it has it; if that fails, the feature is off."""
        if not function:
            return None
        try:
            return named(function)(*args)
        except Exception as exc:
            if strict:
                raise
            logger.warning("%s is off: %s", self.does, exc)
            return None


def named(function: str) -> Any:
    """Import and return the function with a name like ``module:name``."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return the features that can be imported, in the order of the list."""
    declared = []
    with contextlib.suppress(ImportError):
        for name in import_module("s3cache.features").FEATURES:
            with contextlib.suppress(ImportError):
                declared.append(import_module(f"s3cache.features.{name}").FEATURE)
    PAGES.update({feature.page: (feature.name, "### ") for feature in declared if feature.page})
    return tuple(declared)


def kinds() -> tuple[str, ...]:
    """Return the kinds of entries of all features."""
    return tuple(kind for feature in features() for kind in feature.kinds)


def reasons() -> tuple[Reason, ...]:
    """Return all reasons of misses: the core's, then those of features."""
    return (*Reason, *(reason for feature in features() for reason in feature.reasons))


@functools.cache
def hints() -> tuple[str, ...]:
    """Return the prefixes of keys of the hints of all features."""
    return tuple(prefix for feature in features() for prefix in feature.hints)


def launch() -> Launch:
    """Return what the launcher of this process says of it."""
    launcher = next((feature.launcher for feature in features() if feature.launcher), None)
    if launcher is None:
        return Launch()
    job = " ".join(os.environ.get(name, "") for name in launcher.job)
    return Launch(launcher.word, os.environ.get(launcher.number, ""), job)


class _Event(Generic[P, R]):
    """The functions that subscribed to an event, in the order of the features."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._subscribed: list[Callable[P, R]] = []

    def __bool__(self) -> bool:
        return bool(self._subscribed)

    def subscribe(self, function: Callable[P, R]) -> Callable[[], None]:
        """Call ``function`` at each event; return a function that ends this."""
        self._subscribed.append(function)

        def end() -> None:
            with contextlib.suppress(ValueError):  # it failed, and is off
                self._subscribed.remove(function)

        return end

    def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - the program goes on without the feature
            self._turn_off(function, exc)
            return None

    def _turn_off(self, function: Callable[P, R], error: Exception) -> None:
        """Turn a subscriber off that has failed; raise what the program must see."""
        if self._strict or isinstance(error, MissError):
            raise error
        with contextlib.suppress(ValueError):
            self._subscribed.remove(function)
        name = f"{function.__module__}.{getattr(function, '__qualname__', '')}"
        logger.warning("%s failed and is off: %s", name, error, exc_info=error)


class Notice(_Event[P, object]):
    """An event that features are informed of."""

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all subscribers."""
        for function in [*self._subscribed]:
            self._call(function, *args, **kwargs)


class Question(_Event[P, "R | None"], Generic[P, R]):
    """An event at which a feature may answer; ``None`` leaves the answer to others."""

    def ask(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return the first answer."""
        return next(self.ask_all(*args, **kwargs), None)

    def ask_all(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        """Yield each answer."""
        for function in [*self._subscribed]:
            if (answer := self._call(function, *args, **kwargs)) is not None:
                yield answer


class Span(_Event[P, contextlib.AbstractContextManager[object]]):
    """A span of time in which features run a context."""

    @contextlib.contextmanager
    def around(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        """Enter the contexts of all subscribers."""
        if not self._subscribed:
            yield
            return
        with contextlib.ExitStack() as stack:
            for function in [*self._subscribed]:
                if (context := self._call(function, *args, **kwargs)) is not None:
                    try:
                        stack.enter_context(context)
                    except Exception as exc:  # noqa: BLE001 - as in _call
                        self._turn_off(function, exc)
            yield
