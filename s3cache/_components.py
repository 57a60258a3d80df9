"""What a key is the digest of: its components, each a name and a digest of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["KEY_DIGITS", "digest_of"]

#: A key ends in so many hexadecimal digits, those of :func:`digest_of`.
KEY_DIGITS = 64


def digest_of(components: Mapping[str, str]) -> str:
    """The hexadecimal digits that keys of these components end in, whatever the order.

    Args:
        components: digests by name.
    """
    lines = [f"{name}\0{components[name]}\n" for name in sorted(components)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
