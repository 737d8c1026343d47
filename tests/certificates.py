"""A certificate authority for tests, and what it issues."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


class Authority:
    """`ca` is its own certificate, for those who are to trust it."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"the authority {name}")
        self._cert = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *places: str, identified: bool = True) -> tuple[Path, Path]:
        """The files of a certificate (with the authority's behind it) and its key. Places are addresses or
        host names it is good for. One that is not `identified` does not say by which key it was signed, like
        those of older tools; Python 3.13 no longer trusts it."""
        key = ec.generate_private_key(ec.SECP256R1())
        good_for = [
            x509.IPAddress(ipaddress.ip_address(place)) if place[0].isdigit() else x509.DNSName(place)
            for place in places or (name,)
        ]
        cert = self._sign(_name(name), key, x509.SubjectAlternativeName(good_for), identified)
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert_file.write_bytes(cert.public_bytes(serialization.Encoding.PEM) + self.ca.read_bytes())
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_file, key_file

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extension: x509.ExtensionType,
        identified: bool = True,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        draft = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(extension, critical=True)
        )
        if identified:
            own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
            issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            draft = draft.add_extension(own, critical=False).add_extension(issuer, critical=False)
        if subject == self._name:
            draft = draft.add_extension(_SIGNS_CERTIFICATES, critical=True)
        return draft.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
