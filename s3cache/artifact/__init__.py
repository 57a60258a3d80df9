"""What one entry of the compile cache holds, and its frame."""

from s3cache.artifact._artifact import KIND, SCHEMA, Artifact
from s3cache.artifact._images import check_image, open_image

__all__ = ["KIND", "SCHEMA", "Artifact", "check_image", "open_image"]
