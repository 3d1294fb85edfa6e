"""A certificate authority for one test run, and certificates signed by it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Writes ``ca.pem`` and, by ``issue``, ``<name>.pem`` and ``<name>.key`` into ``folder``."""

    def __init__(self, folder: Path, name: str = "test authority", *, days: float = 1.0) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        certificate = (
            self._builder(self._name, self._key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            self._key.public_key()
        )
        self.ca_file = folder / f"{name.replace(' ', '-')}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, days: float = 1.0) -> tuple[Path, Path]:
        """Certificate and key for 127.0.0.1, fit for a server and a client; for so many days from
        now."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            self._builder(_name(name), key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        certificate_file = self._folder / f"{name}.pem"
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file = self._folder / f"{name}.key"
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate_file, key_file

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
