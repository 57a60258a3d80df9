"""Which entries are trusted: keys, signatures, and the policy that checks them."""

from s3cache.trust._keys import Signer, SigningKey, VerifyKey, generate, read_secret, sign
from s3cache.trust._policy import (
    AUDIENCE,
    MACHINE_FILE,
    Cause,
    Level,
    Policy,
    Trusted,
    for_audience,
    parse_trusted,
    policy_of,
    signing_key_of,
)
from s3cache.trust._signatures import (
    MAX_SIGNATURES,
    Algorithm,
    Signature,
    Statement,
    check_name,
    pack,
    unpack,
)
from s3cache.trust._signing_service import TimeLimitedSigner

__all__ = [
    "AUDIENCE",
    "MACHINE_FILE",
    "MAX_SIGNATURES",
    "Algorithm",
    "Cause",
    "Level",
    "Policy",
    "Signature",
    "Signer",
    "SigningKey",
    "Statement",
    "TimeLimitedSigner",
    "Trusted",
    "VerifyKey",
    "check_name",
    "for_audience",
    "generate",
    "pack",
    "parse_trusted",
    "policy_of",
    "read_secret",
    "sign",
    "signing_key_of",
    "unpack",
]
