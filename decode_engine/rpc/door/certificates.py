"""Certificates: the files that a server shows itself by, and asks its clients for."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from decode_engine.rpc.door.refusals import CertificateError


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files. chain: the server's certificate, and those that vouch for it. client_authorities: whose certificates
    clients have to show; None where they need none."""

    chain: Path
    key: Path
    client_authorities: Path | None = None

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
