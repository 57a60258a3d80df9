"""What each process looked up: local, private and bounded, for whoever asks later why it missed.

A process writes one file below ``records/`` in its local tier, a line of JSON for each lookup, and
nothing leaves the machine. Without a local tier there is what the process holds in memory.
"""

from s3cache.records._reading import (
    Folded,
    Run,
    folded,
    in_jobs,
    ranks_in_words,
    read_head,
    read_run,
    run_names,
)
from s3cache.records._record import Event, Lanes, Record, Transfers
from s3cache.records._writing import JOB, Recorder, RecordLimits, job_here

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
