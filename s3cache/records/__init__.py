"""Keep the lookups of each process, local, private and bounded, to explain misses later.

A process writes one file below ``records/`` in its local tier, a line of JSON for each lookup;
nothing leaves the machine. Without a local tier the process holds them in memory.
"""

from s3cache.records._reading import (
    Folded,
    folded,
    in_jobs,
    ranks_in_words,
    read_head,
    read_run,
    run_names,
)
from s3cache.records._record import (
    JOB,
    Event,
    Lanes,
    Record,
    Recorder,
    RecordLimits,
    Run,
    Transfers,
    job_here,
)

__all__ = [
    "JOB",
    "Event",
    "Folded",
    "Lanes",
    "Record",
    "RecordLimits",
    "Recorder",
    "Run",
    "Transfers",
    "folded",
    "in_jobs",
    "job_here",
    "ranks_in_words",
    "read_head",
    "read_run",
    "run_names",
]
