"""What a process's cache counts, for Prometheus and OpenTelemetry.

:func:`families` gives it as plain data, :class:`PrometheusCollector` and :func:`write_textfile` to
Prometheus, :func:`observe` to OpenTelemetry. Each needs that ecosystem's own library, which is
imported when it is first asked for.
"""

from s3cache.metrics._exporters import (
    Observation,
    PrometheusCollector,
    leave_textfile,
    observe,
    write_textfile,
)
from s3cache.metrics._families import FAMILIES, Family, Sample, Source, families

__all__ = [
    "FAMILIES",
    "Family",
    "Observation",
    "PrometheusCollector",
    "Sample",
    "Source",
    "families",
    "leave_textfile",
    "observe",
    "write_textfile",
]
