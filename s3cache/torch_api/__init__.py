"""torch's internals by name, typed, with the releases that have them: all that knows of releases.

``internals`` has every name that s3cache uses, ``protocols`` what the objects look like. Nothing
here knows of storage, or of what is done with torch.
"""

from s3cache.torch_api import internals
from s3cache.torch_api._declare import (
    Declaration,
    Fields,
    Internal,
    Row,
    bind_declarations,
    check_names,
    declarations,
    installed_release,
    installed_version,
    require,
    survey,
)

__all__ = [
    "Declaration",
    "Fields",
    "Internal",
    "Row",
    "bind_declarations",
    "check_names",
    "declarations",
    "installed_release",
    "installed_version",
    "internals",
    "require",
    "survey",
]
