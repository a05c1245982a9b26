"""Tests of the credentials of a job's agents in real TLS handshakes, with the names to which agents connect."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dljob.kube.pki import VALID_FOR, Credentials, issue

POD = "digits-cpu-0.digits.team-a.svc.cluster.local"


def credentials(now: datetime | None = None) -> Credentials:
    return issue("digits", "team-a", "digits", "cluster.local", now or datetime.now(UTC))


MINE, OTHERS = credentials(), credentials()


def context(folder: Path, presented: Credentials | None, trusted: Credentials, *, server: bool) -> ssl.SSLContext:
    """Return a context like the agents': each side presents a certificate and requires one of the job's authority."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    found.verify_mode = ssl.CERT_REQUIRED
    found.load_verify_locations(cadata=trusted.ca_cert.decode())
    if presented is not None:
        (folder / "cert").write_bytes(presented.cert)
        (folder / "key").write_bytes(presented.key)
        found.load_cert_chain(folder / "cert", folder / "key")
    return found


def shake_hands(folder: Path, server: Credentials, client: Credentials | None, name: str) -> None:
    """Make a whole handshake in memory. Raise SSLError if one side rejects the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        context(folder, client, MINE, server=False).wrap_bio(to_client, to_server, server_hostname=name),
        context(folder, server, MINE, server=True).wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting, "the handshake did not finish"


@pytest.mark.parametrize(
    "name", [POD, "digits", "digits.team-a.svc", "digits.team-a.svc.cluster.local", "digits-t4-7.digits.team-a.svc"]
)
def test_agents_of_one_job_authenticate_each_other(tmp_path: Path, name: str) -> None:
    shake_hands(tmp_path, MINE, MINE, name)


@pytest.mark.parametrize("name", ["wine-cpu-0.wine.team-a.svc.cluster.local", "example.org", f"a.{POD}"])
def test_pod_with_another_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, MINE, MINE, name)


def test_server_of_another_ca_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, OTHERS, MINE, POD)


def test_client_of_another_ca_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLError):
        shake_hands(tmp_path, MINE, OTHERS, POD)


def test_client_without_a_certificate_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLError):
        shake_hands(tmp_path, MINE, None, POD)


def test_issued_keys_and_certificates_are_unique() -> None:
    assert len({MINE.ca_cert, OTHERS.ca_cert, MINE.cert, OTHERS.cert, MINE.key, OTHERS.key}) == 6


def test_certificate_is_valid_from_the_past_until_after_any_training() -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    for pem in (credentials(now).cert, credentials(now).ca_cert):
        cert = x509.load_pem_x509_certificate(pem)
        assert cert.not_valid_before_utc <= now - timedelta(minutes=30)
        assert cert.not_valid_after_utc == now + VALID_FOR


def test_certificate_cannot_sign_others() -> None:
    cert = x509.load_pem_x509_certificate(MINE.cert)
    assert cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert cert.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign is False


def test_key_belongs_to_the_certificate_and_not_to_the_ca() -> None:
    key = serialization.load_pem_private_key(MINE.key, None).public_key()
    assert x509.load_pem_x509_certificate(MINE.cert).public_key() == key
    assert x509.load_pem_x509_certificate(MINE.ca_cert).public_key() != key


def test_long_names_are_supported() -> None:
    name = "d" * 40
    made = issue(name, "n" * 63, name, "cluster.local", datetime.now(UTC))
    names = x509.load_pem_x509_certificate(made.cert).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert f"*.{name}.{'n' * 63}.svc.cluster.local" in names.value.get_values_for_type(x509.DNSName)
