"""Errors of the door."""

from __future__ import annotations

from index_store.errors import SparseKVError


class UnauthenticatedError(SparseKVError):
    """The caller has no token that the server knows."""

    reason = "UNAUTHENTICATED"


class TooManyAttemptsError(SparseKVError):
    """Too many wrong tokens came from the caller's address."""

    reason = "TOO_MANY_ATTEMPTS"


class TokenFileError(SparseKVError):
    """The file of tokens is missing, damaged, or open to others."""

    reason = "TOKENS_UNUSABLE"


class CertificateError(SparseKVError):
    """A certificate or key cannot be used."""

    reason = "CERTIFICATE_UNUSABLE"
