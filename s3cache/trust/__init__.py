"""Which entries are trusted: keys, signatures, and the policy that checks them."""

from s3cache.trust._keys import *
from s3cache.trust._policy import *
