"""Whose entries are used: keys, signatures, and the policy that asks for them."""

from s3cache.trust._keys import Signer, SigningKey, VerifyKey, generate, read_secret, sign
from s3cache.trust._policy import Cause, Level, Policy, Trusted, parse_trusted
from s3cache.trust._signatures import (
    MAX_SIGNATURES,
    Algorithm,
    Signature,
    Statement,
    pack,
    unpack,
)

__all__ = [
    "MAX_SIGNATURES",
    "Algorithm",
    "Cause",
    "Level",
    "Policy",
    "Signature",
    "Signer",
    "SigningKey",
    "Statement",
    "Trusted",
    "VerifyKey",
    "generate",
    "pack",
    "parse_trusted",
    "read_secret",
    "sign",
    "unpack",
]
