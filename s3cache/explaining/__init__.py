"""Why did it miss? The nearest entry, and in which words its key differs."""

from s3cache.explaining._differences import Described, Difference, differences
from s3cache.explaining._explain import Explained, Explanation, explain
from s3cache.explaining._runs import meaning

__all__ = [
    "Described",
    "Difference",
    "Explained",
    "Explanation",
    "differences",
    "explain",
    "meaning",
]
