"""What one entry of the compile cache holds, and its frame."""

from s3cache.artifact._artifact import SCHEMA, Artifact, check_image, variant_of
from s3cache.artifact._describe import describe

__all__ = ["SCHEMA", "Artifact", "check_image", "describe", "variant_of"]
