"""What the processes of a job looked up, as numbers and as a page.

:func:`sum_up` counts what :mod:`s3cache.records` has of some runs, :func:`page` draws it.
"""

from s3cache.report._page import page
from s3cache.report._totals import Totals, name_of, sum_up

__all__ = ["Totals", "name_of", "page", "sum_up"]
