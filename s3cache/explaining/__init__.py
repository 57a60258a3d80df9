"""Why did it miss? The nearest entry, and in which words its key differs."""

from s3cache.explaining._differences import Difference, KeyDescription, differences
from s3cache.explaining._explain import Explained, Explanation, explain
from s3cache.explaining._runs import meaning

__all__ = [
    "Difference",
    "Explained",
    "Explanation",
    "KeyDescription",
    "differences",
    "explain",
    "meaning",
]
