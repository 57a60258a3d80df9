"""Names of torch for parsing templates later."""

from __future__ import annotations

from s3cache.torch_api import AnyFunction

TEMPLATES = "torch._inductor.codegen.common"
template_environment = AnyFunction(
    f"{TEMPLATES}:jinja2_env", feature="parsing templates of kernels at their first use"
)
