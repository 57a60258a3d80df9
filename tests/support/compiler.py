"""Import torch and its compiler into the process of the tests, without warnings."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns if NumPy is missing
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
