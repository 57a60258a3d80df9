"""What the processes of a job looked up, as numbers and as a page.

:func:`sum_up` counts what :mod:`s3cache.records` has of some runs, :func:`page` draws it, and
:func:`trace` is for the tools that show traces. :func:`manifest` has the keys that were used.
"""

from s3cache.report._page import page
from s3cache.report._totals import Totals, is_counted, manifest, name_of, sum_up, trace

__all__ = ["Totals", "is_counted", "manifest", "name_of", "page", "sum_up", "trace"]
