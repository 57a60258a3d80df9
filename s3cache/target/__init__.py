"""GPUs that this machine does not have, for programs to compile for: ``s3cache warm --target``.

``_description`` says all that keys hold of a machine with a GPU, and what differs here.
``_standin`` builds what a CUDA build of torch takes for that GPU, out of ``device.c``.
"""

from s3cache.target._description import describe as describe
from s3cache.target._description import entered as entered
from s3cache.target._standin import environment as environment
