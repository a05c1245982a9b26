"""One certificate authority and one certificate for each job, with which the job's agents authenticate each other.

All pods of a job share one key pair. Separate keys would not protect better, because whoever can read the Secret of
one pod can also read the Secrets of the others. The certificate is valid for servers and clients and contains the DNS
names of the headless Service and its pods.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = timedelta(days=1096)
"""Lifetime of a certificate. It is longer than any training, because certificates are never renewed.

The Secret with the certificate is deleted together with its job.
"""
_SKEW = timedelta(hours=1)
"""Certificates are valid from this time before their creation, because the clocks of some nodes may be behind."""


@dataclass(frozen=True)
class Credentials:
    """Certificate of the authority, and the certificate and private key of a job, in PEM format."""

    ca_cert: bytes
    cert: bytes
    key: bytes


def issue(job: str, namespace: str, service: str, cluster_domain: str, now: datetime) -> Credentials:
    """Create a certificate authority for one job, and the only certificate that it signs: the one for all its pods.

    The key of the authority is discarded, so nobody can sign another certificate with it. An agent verifies the DNS
    name to which it connects, ``<pod>.<service>.<namespace>.svc.<cluster_domain>``. The certificate contains a wildcard
    for these names, and the name ``service``.
    """
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dljob {secrets.token_hex(8)}")])
    ca_cert = (
        _builder(ca_name, ca_name, ca_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    base = f"{service}.{namespace}.svc.{cluster_domain}"
    names = [service, f"{service}.{namespace}.svc", base, f"*.{base}", f"*.{service}.{namespace}.svc"]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, job[:64])])
    cert = (
        _builder(subject, ca_name, key.public_key(), now)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Credentials(
        ca_cert.public_bytes(pem),
        cert.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + VALID_FOR)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
