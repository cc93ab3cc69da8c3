"""A certificate authority for tests and the certificates it signs."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = timedelta(days=30)


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: an authority, and the certificates it signed for a server and for a client."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


@dataclass(frozen=True)
class _Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Backdated, so that the certificate is valid for a client whose clock is a little behind.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
    )


def _create_authority() -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder("testbed CA", _name("testbed CA"), key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Authority(key, certificate)


def _issue(
    authority: _Authority,
    subject: str,
    usage: x509.ObjectIdentifier,
    names: list[x509.GeneralName],
    cert_path: Path,
    key_path: Path,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(subject, authority.certificate.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            # Python 3.13 verifies strictly and refuses a certificate without it.
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    key_path.chmod(0o600)


def make_tls(folder: Path) -> TlsFiles:
    """Create an authority, a server certificate for 127.0.0.1 and localhost, and a client certificate in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TlsFiles(
        ca=folder / "ca.pem",
        cert=folder / "server.pem",
        key=folder / "server-key.pem",
        client_cert=folder / "client.pem",
        client_key=folder / "client-key.pem",
    )
    authority = _create_authority()
    files.ca.write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))
    server_names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
    _issue(authority, "localhost", ExtendedKeyUsageOID.SERVER_AUTH, server_names, files.cert, files.key)
    _issue(
        authority,
        "testbed client",
        ExtendedKeyUsageOID.CLIENT_AUTH,
        [x509.DNSName("testbed-client")],
        files.client_cert,
        files.client_key,
    )
    return files
