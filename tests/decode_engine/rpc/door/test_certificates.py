"""Certificates that change are shown to whoever comes next, and names in those of clients are their tenants."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.client import Client, Credentials
from decode_engine.rpc.door.access import Door, TokenFile, UnauthenticatedError
from decode_engine.rpc.door.options import Certificates
from decode_engine.rpc.server import DecodeServer
from index_store.store.description.callers import Caller
from sparsekv.v1 import context_pb2, context_pb2_grpc
from tests.decode_engine.conftest import make_library
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Authority:
    """Signs certificates into a folder."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        made = cls(folder, name, key, _certificate(name, key.public_key(), name, key, authority=True))
        made.file.write_bytes(made.certificate.public_bytes(serialization.Encoding.PEM))
        return made

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def sign(self, subject: str, to: str) -> tuple[Path, Path]:
        """A certificate and its key, in files of that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(subject, key.public_key(), self.name, self.key)
        paths = self.folder / f"{to}.crt", self.folder / f"{to}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths


def _certificate(
    subject: str,
    public: ec.EllipticCurvePublicKey,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    authority: bool = False,
) -> x509.Certificate:
    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )


@dataclass(frozen=True)
class Encrypted:
    """A server at both ports. first: whose certificates count at the beginning; second: whose come later."""

    server: DecodeServer
    gateway: Gateway
    first: Authority
    second: Authority

    def reaches(self, trusted: Authority, mine: tuple[Path, Path]) -> tuple[bool, bool]:
        """Whether who trusts an authority and shows a certificate gets through, over gRPC and HTTP, anew."""
        credentials = Credentials(None, trusted.file, *mine)
        with Client(f"localhost:{self.server.address.rpartition(':')[2]}", credentials=credentials) as client:
            by_grpc = client.is_serving()
        context = ssl.create_default_context(cafile=str(trusted.file))
        context.load_cert_chain(*mine)
        port = self.gateway.address.rpartition(":")[2]
        try:
            by_http = (
                httpx.get(f"https://localhost:{port}/health", verify=context, timeout=60).status_code == 200
            )
        except httpx.TransportError:
            by_http = False
        return by_grpc, by_http


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder = tmp_path_factory.mktemp("encrypted")
    library = make_library(folder)
    first, second = Authority.make(folder, "first"), Authority.make(folder, "second")
    chain, key = first.sign("server", "server")
    clients = folder / "clients.pem"
    clients.write_bytes(first.file.read_bytes())
    TokenFile(folder / "tokens").create("ops", "ops", ("read", "admin"))
    config = library.config(
        tls_cert=chain, tls_key=key, tls_client_ca=clients, tls_names=True, tokens=folder / "tokens"
    )
    with (
        DecodeServer(config) as server,
        Gateway("127.0.0.1:0", server.grpc, certificates=server.grpc.certificates) as gateway,
    ):
        server.load()
        yield Encrypted(server, gateway, first, second)


def test_a_certificates_name_is_its_tenant(encrypted: Encrypted) -> None:
    """Over both ports; a name that is none of a tenant lets nobody in."""
    first, folder = encrypted.first, encrypted.first.folder
    encrypted.server.grpc.store.path.joinpath("uploads").mkdir(exist_ok=True)
    for name, allowed in (("acme", True), ("no tenant/", False)):
        mine = first.sign(name, "client")
        address = f"localhost:{encrypted.server.address.rpartition(':')[2]}"
        with Client(address, credentials=Credentials(None, first.file, *mine)) as client:
            if allowed:
                client.upload_document(b"text")
            else:
                with pytest.raises(UnauthenticatedError):
                    client.upload_document(b"text")
        context = ssl.create_default_context(cafile=str(first.file))
        context.load_cert_chain(*mine)
        url = f"https://localhost:{encrypted.gateway.address.rpartition(':')[2]}"
        with httpx.Client(base_url=url, verify=context, timeout=60) as web:
            assert web.get("/v1/contexts").status_code == (200 if allowed else 401)
            assert web.get("/v1/status").status_code == (403 if allowed else 401)
    (upload,) = (folder / "store" / "uploads").iterdir()
    assert upload.name.endswith("-acme")


def test_a_door_takes_a_token_before_a_name(tmp_path: Path) -> None:
    secret = TokenFile(tmp_path / "tokens").create("bob", "beta")
    with Door(tmp_path / "tokens", names=True) as door:
        assert door.check(f"Bearer {secret}", "a", "acme").tenant == "beta"
        named = door.check(None, "a", "acme")
        assert named == Caller("acme", frozenset({"read", "create", "delete"}), "acme")
        for name in ("", "*", "a b"):
            with pytest.raises(UnauthenticatedError):
                door.check(None, "a", name)
        with pytest.raises(UnauthenticatedError):
            door.check("Bearer wrong", "a", "acme")
    with Door(tmp_path / "tokens") as door, pytest.raises(UnauthenticatedError):
        door.check(None, "a", "acme")


def test_certificates_that_change_are_shown_next_and_what_is_open_stays(
    encrypted: Encrypted, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = encrypted.first, encrypted.second
    folder, old = first.folder, first.sign("acme", "old")
    assert encrypted.reaches(first, old) == (True, True)
    credentials = grpc.ssl_channel_credentials(
        first.file.read_bytes(), old[1].read_bytes(), old[0].read_bytes()
    )
    port = encrypted.server.address.rpartition(":")[2]
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        stub = context_pb2_grpc.ContextServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.ListContexts(context_pb2.ListContextsRequest())
        new = second.sign("acme", "new")
        (folder / "clients.pem").write_bytes(second.file.read_bytes())
        second.sign("server", "server")
        wait_until(lambda: encrypted.reaches(second, new) == (True, True))
        stub.ListContexts(context_pb2.ListContextsRequest())  # on the connection of before
    assert encrypted.reaches(first, old) == (False, False)
    assert encrypted.reaches(second, old) == (False, False)  # whose authority counts no more
    (folder / "server.crt").write_text("no certificate")
    assert encrypted.reaches(second, new) == (True, True)
    assert "the certificates stay as they were" in caplog.text


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_nobody_comes_back_by_a_session_of_an_authority_that_counts_no_more(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    first, second = Authority.make(tmp_path, "first"), Authority.make(tmp_path, "second")
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(first.file.read_bytes())
    certificates = Certificates(*first.sign("server", "server"), authorities)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificates.chain, certificates.key)
    serving.verify_mode = ssl.CERT_REQUIRED
    serving.load_verify_locations(authorities)
    certificates.renew(serving)
    asking = ssl.create_default_context(cafile=str(first.file))
    asking.maximum_version = version
    asking.load_cert_chain(*first.sign("acme", "acme"))
    session = _connect(serving, asking, None)
    authorities.write_bytes(second.file.read_bytes())
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        _connect(serving, asking, session)


def _connect(
    serving: ssl.SSLContext, asking: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLSession | None:
    """The session of a connection in which the server has said something. session: by which the client comes back."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 3:
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    server.write(b"words")
    assert client.read(5) == b"words"
    return client.session


def test_a_certificate_says_when_it_has_changed(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path, "authority")
    chain, key = authority.sign("server", "server")
    certificates = Certificates(chain, key)
    stamp = certificates.stamp()
    assert not certificates.changed(stamp)
    authority.sign("server", "server")
    assert certificates.changed(stamp)
    key.unlink()
    assert not certificates.changed(stamp)
