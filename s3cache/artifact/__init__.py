"""Entries of the compile cache: their sections, and the description of the graph in the header."""

from s3cache.artifact._artifact import CONDITIONS as CONDITIONS
from s3cache.artifact._artifact import SCHEMA as SCHEMA
from s3cache.artifact._artifact import Artifact as Artifact
from s3cache.artifact._artifact import check_image as check_image
from s3cache.artifact._artifact import section_of as section_of
from s3cache.artifact._artifact import unpickle as unpickle
from s3cache.artifact._artifact import variant_of as variant_of
from s3cache.artifact._description import describe as describe
from s3cache.artifact._description import described as described
from s3cache.artifact._description import description as description
from s3cache.artifact._description import hidden_places as hidden_places
from s3cache.artifact._description import hidden_source as hidden_source
from s3cache.artifact._description import inputs_and_outputs as inputs_and_outputs
from s3cache.artifact._description import without_places as without_places
