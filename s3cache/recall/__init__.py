"""Recall: Dynamo's result for a frame as plain data, and its comparison with live objects."""

from s3cache.recall._candidate import Candidate as Candidate
from s3cache.recall._candidate import renamed as renamed
from s3cache.recall._candidate import restored as restored
from s3cache.recall._candidate import unpacked as unpacked
from s3cache.recall._content import UnknownContentError as UnknownContentError
from s3cache.recall._recording import Frame as Frame
from s3cache.recall._recording import Recording as Recording
from s3cache.recall._recording import RefusedError as RefusedError
from s3cache.recall._walk import Walk as Walk
