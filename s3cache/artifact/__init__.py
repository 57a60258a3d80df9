"""What one entry of the compile cache holds, its frame, and what its header says of the graph."""

from s3cache.artifact._artifact import *
from s3cache.artifact._description import *
