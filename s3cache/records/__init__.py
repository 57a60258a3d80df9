"""What each process looked up: local, private and bounded, for whoever asks later why it missed.

A process writes one file below ``records/`` in its local tier, a line of JSON for each lookup, and
nothing leaves the machine. Without a local tier there is what the process holds in memory.
"""

from s3cache.records._reading import Run, read_run, run_names
from s3cache.records._record import Record
from s3cache.records._writing import Recorder, RecordLimits

__all__ = ["Record", "RecordLimits", "Recorder", "Run", "read_run", "run_names"]
