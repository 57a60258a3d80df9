"""Make torchvision importable beside a torch that was built for the CPU; ``make`` runs it once.

The torchvision of the Python Package Index is built for CUDA. Beside a CPU build its operators do
not load. torchvision tolerates that, but then describes two of these operators, which raises an
error because they are not declared. So ``import timm`` fails, and so does other code that only
checks whether torchvision is there. None of our programs calls such an operator. If the operators
load, this changes nothing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_DECLARATION = """
if not _has_ops():  # declared by s3cache's tests/frameworks/mend.py
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def main() -> None:
    found = importlib.util.find_spec("torchvision")
    assert found is not None, "torchvision is not installed"
    assert found.origin is not None
    extension = Path(found.origin).with_name("extension.py")
    text = extension.read_text(encoding="utf-8")
    if _DECLARATION not in text:
        extension.write_text(text + _DECLARATION, encoding="utf-8")


if __name__ == "__main__":
    main()
