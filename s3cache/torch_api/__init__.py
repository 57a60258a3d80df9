"""torch's internals by name, typed, with the releases that have them: all that knows of releases.

``internals`` has every name that s3cache uses, ``protocols`` what the objects look like. Nothing
here knows of storage, or of what is done with torch.
"""

from s3cache.torch_api import internals as internals
from s3cache.torch_api._declare import *
