"""What one entry of the compile cache holds, and its frame."""

from s3cache.artifact._artifact import KIND, SCHEMA, Artifact, check_image
from s3cache.artifact._describe import describe

__all__ = ["KIND", "SCHEMA", "Artifact", "check_image", "describe"]
