"""A job that finds entries under its key which do not fit, and asks why."""

from __future__ import annotations

from typing import Any


def explained(url: str) -> dict[str, Any]:
    """What missed for a guard: for a first size, for one of another parity, and for views."""
    import torch

    import s3cache

    def function(x: Any, y: Any) -> Any:
        # Two branches with one graph: only the guard tells them apart.
        return x @ y if x.shape[0] % 2 else x @ y  # noqa: RUF034

    def changed(a: Any, b: Any) -> Any:
        a.mul_(2)
        return a + b

    said: dict[str, Any] = {}
    for name, size in (("first", 5), ("second", 6)):
        torch._dynamo.reset()
        with s3cache.enabled(url):
            x, y = torch.ones(size, 4), torch.ones(4, 10)
            torch._dynamo.mark_dynamic(x, 0)
            torch.compile(function)(x, y)
            said[name] = _of_guards(s3cache.explain(remote=False))
    torch._dynamo.reset()
    with s3cache.enabled(url):
        compiled = torch.compile(changed, dynamic=True)
        for behind in (12, 1):
            flat = torch.arange(1.0, 41.0)
            compiled(flat[1:7], flat[1 + behind : 7 + behind])
        explanation = s3cache.explain(remote=False)
    return {**said, "third": _of_guards(explanation), "said": str(explanation)}


def _of_guards(explained: Any) -> list[dict[str, Any]]:
    found = explained.as_dict()["explanations"]
    return [each for each in found if each["level"] == "aot" and each["reason"] == "guard"]
