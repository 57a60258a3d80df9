"""Compile for a GPU that this machine does not have: ``s3cache warm --target``.

``_description`` collects all inputs of keys on a machine with a GPU, and compares them with this
machine. ``_standin`` builds a library from ``device.c``, which torch takes for the GPU.
"""

from s3cache.target._description import describe as describe
from s3cache.target._description import stand_in as stand_in
from s3cache.target._standin import environment as environment
