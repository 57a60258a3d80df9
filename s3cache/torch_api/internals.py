"""Every internal of torch that s3cache uses, by name, and the releases that are supported.

The modules beside this one declare them by subject, and have what it takes to use them where
releases differ or a name does not say it all. A declaration without a release holds for all from
:data:`OLDEST` to :data:`NEWEST`. ``python -m s3cache.torch_api`` checks every declaration against
the torch that is installed.
"""

from __future__ import annotations

from s3cache.torch_api._declare import Release, installed_release, installed_version
from s3cache.torch_api._unpickled import *
from s3cache.torch_api.aot import *
from s3cache.torch_api.dispatcher import *
from s3cache.torch_api.dynamo import *
from s3cache.torch_api.inductor import *
from s3cache.util.logs import logger_of
from s3cache.util.pages import pointer

OLDEST: Release = (2, 11)
NEWEST: Release = (2, 15)

#: The module whose import means that something will be compiled; it imports the others here.
COMPILER = "torch._inductor.compile_fx"
#: The one whose import means that torch's own caches are about to be used: it comes with the
#: compiler, or earlier where a program loads artifacts into them.
CODE_CACHES = "torch._inductor.codecache"
TORCH = "torch"

_warned = False


def is_supported() -> bool:
    """Return whether the installed torch is new enough; if not, log one warning."""
    global _warned
    if installed_release() >= OLDEST:
        return True
    if not _warned:
        logger_of().warning(
            "torch %s is not supported (%d.%d and later are); it compiles without a cache %s",
            installed_version(),
            *OLDEST,
            pointer("UnsupportedTorchError"),
        )
        _warned = True
    return False


def is_untested() -> bool:
    """Return whether the installed torch is newer than any release that was tried."""
    return installed_release() > NEWEST
