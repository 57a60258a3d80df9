"""torch, in the process of the tests: these judge and digest graphs, and compile nothing."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch without NumPy says so
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
