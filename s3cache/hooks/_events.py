"""The events of a session, to which features subscribe; see :mod:`s3cache.seam`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.seam import Notice, Question, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

    from s3cache.cache import Hit, Retry
    from s3cache.errors import Reason
    from s3cache.frame import Frame
    from s3cache.hooks._calls import Limits, Lookup, Result, Save
    from s3cache.torch_api.protocols import CompiledGraph


class CompileEvents:
    """The events of one session, as torch compiles.

    Attributes:
        looking_up: torch looks a whole graph up, and a hit depends on other processes.
        barred: why no entry may be used, not even torch's own, where a hit depends on other
            processes. Asked before the entries of an FX graph are searched, and before and after
            torch makes a callable of a whole graph.
        missed: no entry fits; a process may wait for another one, and search again.
        is_awaited: whether the entry must be uploaded at once.
        rebuilding: torch is about to load a graph with kernels of Triton.
        fits: why code with limits cannot be used here as it is; empty if it can.
        load: a function that unpickles code with limits, or returns why it cannot be used here.
        hit: torch has made a callable of an entry.
        limit: where code can run that was made for a device (or none), or among ranks.
        saving: torch is about to pickle a result.
        describe: more for the header of an entry.
        saved: an entry was saved, or not; a whole graph is, once Dynamo has accepted its frame.
        looked_up: a whole graph that Dynamo has traced was looked up, or has no key.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.looking_up: Span[[Lookup, GraphModule, Sequence[object]]] = Span(strict=strict)
        self.barred: Question[[Lookup], Reason] = Question(strict=strict)
        self.missed: Question[[Lookup], Retry] = Question(strict=strict)
        self.is_awaited: Question[[Save], bool] = Question(strict=strict)
        self.rebuilding: Notice[[CompiledGraph]] = Notice(strict=strict)
        self.fits: Question[[object], str] = Question(strict=strict)
        self.load: Question[[object, bytes], Callable[[], object]] = Question(strict=strict)
        self.hit: Notice[[Lookup, Hit, Result]] = Notice(strict=strict)
        self.limit: Question[[Save, str], Limits] = Question(strict=strict)
        self.saving: Notice[[Save]] = Notice(strict=strict)
        self.describe: Question[[Save], Mapping[str, object]] = Question(strict=strict)
        self.saved: Notice[[Save, Frame, bool]] = Notice(strict=strict)
        self.looked_up: Notice[[Lookup]] = Notice(strict=strict)
