"""Execute a file of a test as a module, with names that it only has meanwhile."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def execute(path: Path, **names: object) -> ModuleType:
    """Execute a file as the module of its name, with its folder first in ``sys.path``.

    ``names`` are not part of the module afterwards, since a function could see them.
    """
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    spec.loader.exec_module(module)
    for name in names:
        del vars(module)[name]
    return module
