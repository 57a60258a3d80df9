"""Export the counts of a process's cache to Prometheus and OpenTelemetry.

:func:`families` gives them as plain data, :class:`PrometheusCollector` and :func:`write_textfile`
to Prometheus, :func:`observe` to OpenTelemetry. Their own libraries are imported on first use.
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
