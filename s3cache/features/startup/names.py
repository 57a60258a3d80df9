"""Names of torch for parsing templates later."""

from __future__ import annotations

from s3cache.torch_api import AnyFunction

#: The module that parses templates at its import and at those of others after it.
TEMPLATES = "torch._inductor.select_algorithm"
template_environment = AnyFunction(
    "torch._inductor.codegen.common:jinja2_env",
    feature="parsing templates of kernels at their first use",
)
