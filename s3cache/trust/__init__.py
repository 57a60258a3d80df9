"""Decide which entries are trusted: keys, signatures, and the policy that checks them."""

from s3cache.trust._keys import MAX_SIGNATURES as MAX_SIGNATURES
from s3cache.trust._keys import Algorithm as Algorithm
from s3cache.trust._keys import Signature as Signature
from s3cache.trust._keys import Signer as Signer
from s3cache.trust._keys import SigningKey as SigningKey
from s3cache.trust._keys import TimeLimitedSigner as TimeLimitedSigner
from s3cache.trust._keys import VerifyKey as VerifyKey
from s3cache.trust._keys import generate as generate
from s3cache.trust._keys import pack as pack
from s3cache.trust._keys import sign as sign
from s3cache.trust._keys import unpack as unpack
from s3cache.trust._policy import AUDIENCE as AUDIENCE
from s3cache.trust._policy import MACHINE_FILE as MACHINE_FILE
from s3cache.trust._policy import Cause as Cause
from s3cache.trust._policy import Policy as Policy
from s3cache.trust._policy import Trusted as Trusted
from s3cache.trust._policy import TrustMode as TrustMode
from s3cache.trust._policy import for_audience as for_audience
from s3cache.trust._policy import parse_trusted as parse_trusted
from s3cache.trust._policy import policy_of as policy_of
from s3cache.trust._policy import read_secret as read_secret
from s3cache.trust._policy import signing_key_of as signing_key_of
