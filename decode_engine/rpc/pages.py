"""Which contexts a request means: one by name, or a page of all, whose next one travels in a signed token (AIP-158)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from bisect import bisect_right
from itertools import islice

from decode_engine.rpc.validation import parse_name
from index_store.errors import ContextNotFoundError, InvalidArgumentError
from index_store.store.catalog import Store
from index_store.store.listing import Entry, Place, place_of
from sparsekv.v1 import context_pb2

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
MAX_REFERENCE_CHARACTERS = 600

_SIGNATURE_BYTES = 16


def find_context(store: Store, request: context_pb2.GetContextRequest) -> Entry:
    """The context that a request names or calls something.

    Raises InvalidArgumentError, ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
    """
    if bool(request.name) == bool(request.reference):
        raise InvalidArgumentError("give exactly one of name, reference", field="name")
    if len(request.reference) > MAX_REFERENCE_CHARACTERS:
        raise InvalidArgumentError(
            f"reference has {len(request.reference)} characters, expected at most {MAX_REFERENCE_CHARACTERS}",
            field="reference",
        )
    return store.entry(parse_name(request.name) if request.name else store.resolve(request.reference))


class Pager:
    """Cuts lists of contexts into pages. Tokens are valid for the pager that made them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def page(self, store: Store, page_size: int, page_token: str) -> tuple[list[Entry], str]:
        """One page, newest first, and the token of the next one ("" for the last page).

        A page starts after the last entry of the page before, wherever that entry would stand now. Its entries are as
        they are now: those that were deleted meanwhile are left out. Raises InvalidArgumentError for a negative size or
        a token of another origin.
        """
        if page_size < 0:
            raise InvalidArgumentError(f"page_size is {page_size}, expected 0 or more", field="page_size")
        size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        last = self._read(page_token) if page_token else None
        entries = store.entries()
        start = 0 if last is None else bisect_right(entries, last, key=place_of)
        listed = list(islice(entries, start, start + size))
        token = self._write(place_of(listed[-1])) if start + size < len(entries) else ""
        page = []
        for entry in listed:
            try:
                page.append(store.entry(entry.id))
            except ContextNotFoundError:
                continue
        return page, token

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
