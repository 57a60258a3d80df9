"""Certificates for a TLS server on this machine, signed by authorities of the test."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates of the server at 127.0.0.1."""

    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self._name, self._key, is_authority=True)

    def certify(self, tls: ssl.SSLContext, folder: Path) -> None:
        """Let the server of ``tls`` show a certificate of this authority from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        path = folder / "server.pem"
        path.write_bytes(secret + self._sign(name, key, is_authority=False))
        tls.load_cert_chain(path)

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool
    ) -> bytes:
        now = datetime.now(timezone.utc)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        signed = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return signed.public_bytes(serialization.Encoding.PEM)
