"""torch and its compiler, in the process of the tests: importing this loads them quietly."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch without NumPy says so
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
