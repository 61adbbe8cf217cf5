"""Pages of a list of contexts: where the next one starts travels in an opaque, signed token (AIP-158)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence

from index_store.errors import InvalidArgumentError
from index_store.store.catalog import BrokenContext
from index_store.store.manifest import Manifest

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

Entry = Manifest | BrokenContext
Place = tuple[int, float, str]

_SIGNATURE_BYTES = 16


class Pager:
    """Cuts lists of contexts into pages. Tokens are valid for the pager that made them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def page(self, entries: Sequence[Entry], page_size: int, page_token: str) -> tuple[list[Entry], str]:
        """One page, newest first, and the token of the next one ("" for the last page).

        A page starts after the last entry of the page before, wherever that entry would stand now. Raises
        InvalidArgumentError for a negative size or a token of another origin.
        """
        if page_size < 0:
            raise InvalidArgumentError(f"page_size is {page_size}, expected 0 or more", field="page_size")
        size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        rest = sorted(entries, key=_place)
        if page_token:
            last = self._read(page_token)
            rest = [entry for entry in rest if _place(entry) > last]
        page = rest[:size]
        return page, self._write(_place(page[-1])) if len(rest) > size else ""

    def _write(self, place: Place) -> str:
        payload = json.dumps(place).encode()
        return base64.urlsafe_b64encode(self._sign(payload) + payload).decode()

    def _read(self, token: str) -> Place:
        try:
            raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raw = b""
        signature, payload = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(payload)):
            raise InvalidArgumentError(
                "page_token is not one that this server issued since it started; "
                "pass next_page_token of the previous page unchanged, or start again without one",
                field="page_token",
            )
        broken, age, id_ = json.loads(payload)
        return broken, age, id_

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, hashlib.sha256)[:_SIGNATURE_BYTES]


def _place(entry: Entry) -> Place:
    """Where an entry stands: newest first, unreadable ones at the end."""
    if isinstance(entry, BrokenContext):
        return 1, 0.0, entry.id
    return 0, -entry.created_at.timestamp(), entry.id
