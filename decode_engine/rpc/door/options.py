"""Options of whoever listens at a port, and of whoever calls there, and the certificates that they show."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from decode_engine.rpc.door.access import MAX_TOKEN_CHARACTERS, CertificateError
from index_store.cli.options import Address, Filled, InputFile
from index_store.errors import InvalidArgumentError
from index_store.store.files.reading import stamp_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files. chain: the server's certificate, and those that vouch for it. client_authorities: whose certificates
    clients have to show; None where they need none."""

    chain: Path
    key: Path
    client_authorities: Path | None = None

    @classmethod
    def given(
        cls, chain: Path | None, key: Path | None, client_authorities: Path | None = None
    ) -> Certificates | None:
        """Those to show, checked; None where nothing is encrypted. Raises CertificateError."""
        if chain is None or key is None:
            return None
        found = cls(chain, key, client_authorities)
        found.check()
        return found

    def check(self) -> None:
        """Raises CertificateError, which names the option, for files that are missing or do not go together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.chain, self.key, password=_no_password)
        except _LockedKeyError as error:
            raise CertificateError(
                f"--tls-key is {str(self.key)!r}, which is locked by a password; expected a key without one, in a file "
                "that its owner alone can read"
            ) from error
        except OSError as error:  # what ssl raises, too
            raise CertificateError(
                f"--tls-cert {str(self.chain)!r} and --tls-key {str(self.key)!r} cannot be used ({_reason(error)}); "
                "expected a certificate chain and its private key, both as PEM"
            ) from error
        if self.client_authorities is not None:
            check_authorities(self.client_authorities, "--tls-client-ca")

    def stamp(self) -> tuple[object, ...]:
        """Changes whenever one of the files does."""
        files = (self.chain, self.key, self.client_authorities)
        return tuple(None if path is None else stamp_of(path) for path in files)

    def changed(self, since: tuple[object, ...]) -> bool:
        """Whether the files are others than those of a stamp, and can be used; what cannot goes to the log."""
        if self.stamp() == since:
            return False
        try:
            self.check()
        except CertificateError as error:
            logger.error("the certificates stay as they were: %s", error.message)
            return False
        logger.info("the certificates have changed")
        return True

    def context(self) -> ssl.SSLContext:
        """For connections of clients. Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.chain, self.key)
        if self.client_authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_authorities)
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Has each new connection by a context be one by the files as they are then. Those that are open stay."""
        present, stamp = context, self.stamp()
        if (
            self.client_authorities is not None
        ):  # else a client comes back by one whose authority counts no more
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET  # the same before TLS 1.3

        def choose(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            nonlocal present, stamp
            seen = self.stamp()
            if self.changed(stamp):
                present = self.context()
            stamp = seen
            connection.context = present

        context.sni_callback = choose


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """The subject's name in a peer's certificate, as `ssl` tells of it; "" where it has none."""
    parts = (part for parts in (certificate or {}).get("subject", ()) for part in parts)
    return next((value for kind, value in parts if kind == "commonName"), "")


def check_authorities(path: Path, flag: str) -> None:
    """Raises CertificateError for a file without certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise CertificateError(
            f"{flag} is {str(path)!r}, which cannot be used ({_reason(error)}); expected certificates as PEM"
        ) from error


class _LockedKeyError(Exception):
    """A key wants a password."""


def _no_password() -> str:
    raise _LockedKeyError


def _reason(error: OSError) -> str:
    return error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)


DEFAULT_LISTEN = "127.0.0.1:50051"
SYSTEM_AUTHORITIES = "system"
"""In place of a file: whom this machine trusts anyway."""
TOKEN_VARIABLE = "SPARSEKV_TOKEN"


class AuthoritiesFile(InputFile):
    """A file of certificates, or the word for those that this machine trusts anyway."""

    def check(self, flag: str, value: object) -> None:
        if str(value) != SYSTEM_AUTHORITIES:
            InputFile.check(self, flag, value)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


TlsCertOption = Annotated[
    Path | None, "Encrypt, with this certificate (PEM, with those that vouch for it).", InputFile()
]
TlsKeyOption = Annotated[Path | None, "The certificate's private key (PEM).", InputFile()]
TlsClientCaOption = Annotated[
    Path | None,
    "Ask clients for certificates, too, that one of these authorities signed (PEM).",
    InputFile(),
]
TokensOption = Annotated[
    Path | None,
    Option(
        "--tokens",
        metavar="FILE",
        help="Let in only who shows a token of this file, which `decode-engine token` makes.",
    ),
    InputFile(),
]
JwtKeysOption = Annotated[
    str | None,
    Option(
        "--jwt-keys",
        metavar="FILE|URL",
        help="Let in who shows a JWT that one of these public keys (a JWK set) signed; https addresses are asked again "
        "every 5 minutes.",
    ),
]
JwtIssuerOption = Annotated[str, "With --jwt-keys: the issuer that a JWT names."]
JwtAudienceOption = Annotated[str, "With --jwt-keys: the audience that a JWT is for."]
JwtTenantClaimOption = Annotated[
    str, Option("--jwt-tenant-claim", metavar="NAME", help="The claim that says whose a JWT is."), Filled()
]
JwtRightsClaimOption = Annotated[
    str,
    Option(
        "--jwt-rights-claim",
        metavar="NAME",
        help="The claim that says what it may: some of read, create, delete, admin; read where it says nothing.",
    ),
    Filled(),
]
TlsNamesOption = Annotated[
    bool,
    "With --tls-client-ca: let in who shows a certificate and no token, as the tenant that its subject's "
    "common name is, with all rights but admin.",
]
AllowRemoteOption = Annotated[
    bool,
    "Listen where other machines reach it without encryption or tokens: whoever can reach the port may read "
    "what is sent, or question and delete every context.",
]


ServerOption = Annotated[
    str,
    Option("--server", envvar="SPARSEKV_SERVER", metavar="HOST:PORT", help="The server to ask."),
    Address(),
]
TokenFileOption = Annotated[
    Path | None,
    Option(
        "--token-file",
        envvar="SPARSEKV_TOKEN_FILE",
        metavar="FILE",
        help=f"Show the token in this file; without it the one in {TOKEN_VARIABLE}, if that is set.",
    ),
    InputFile(),
]
CaFileOption = Annotated[
    Path | None,
    Option(
        "--ca-file",
        envvar="SPARSEKV_CA_FILE",
        metavar="FILE",
        help="Encrypt, and trust a server whose certificate these authorities signed (PEM); `system`: those that this "
        "machine trusts.",
    ),
    AuthoritiesFile(),
]
ClientCertOption = Annotated[
    Path | None,
    Option(
        "--client-cert",
        envvar="SPARSEKV_CLIENT_CERT",
        metavar="FILE",
        help="Show this certificate to a server that asks for one (PEM).",
    ),
    InputFile(),
]
ClientKeyOption = Annotated[
    Path | None,
    Option("--client-key", envvar="SPARSEKV_CLIENT_KEY", metavar="FILE", help="Its private key (PEM)."),
    InputFile(),
]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows, and whom it trusts.

    ca_file: PEM certificates of the authorities that it trusts, or the path `system`; None does not encrypt.
    client_cert, client_key: PEM files, for servers that ask for a certificate. Raises InvalidArgumentError for parts
    that do not go together, CertificateError for a file without certificates.
    """

    token: str | None = None
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.client_cert is None) != (self.client_key is None):
            raise InvalidArgumentError(
                "expected both of --client-cert and --client-key, or neither", field="client_cert"
            )
        if self.client_cert is not None and self.ca_file is None:
            raise InvalidArgumentError(
                "--client-cert is given without --ca-file, which encryption needs", field="client_cert"
            )
        if self.ca_file is not None and self.authorities is not None:
            check_authorities(self.ca_file, "--ca-file")
        token = self.token
        if token is not None and not (
            token.isascii() and token.isprintable() and 0 < len(token) <= MAX_TOKEN_CHARACTERS
        ):
            raise InvalidArgumentError(
                f"the token has {len(token)} characters, expected 1 to {MAX_TOKEN_CHARACTERS} that are ASCII "
                "and can be printed",
                field="token",
            )

    @property
    def authorities(self) -> Path | None:
        """The file of authorities; None for this machine's own."""
        return None if str(self.ca_file) == SYSTEM_AUTHORITIES else self.ca_file


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustOptions:
    """How a program encrypts what it sends to a server. ca_file: None does not encrypt."""

    ca_file: CaFileOption = None
    client_cert: ClientCertOption = None
    client_key: ClientKeyOption = None

    def credentials(self) -> Credentials:
        """What to show. Raises InvalidArgumentError, CertificateError."""
        return Credentials(ca_file=self.ca_file, client_cert=self.client_cert, client_key=self.client_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialOptions(TrustOptions):
    """What a command shows to a server."""

    token_file: TokenFileOption = None

    def credentials(self) -> Credentials:
        """What to show. Raises InvalidArgumentError, CertificateError."""
        return replace(TrustOptions.credentials(self), token=read_token(self.token_file))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(CredentialOptions):
    """Which server a command asks."""

    server: ServerOption = DEFAULT_LISTEN


def read_token(path: Path | None) -> str | None:
    """The token in a file, else in the environment, else None. Raises InvalidArgumentError."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--token-file is {str(path)!r}, which cannot be read: {error}") from error
