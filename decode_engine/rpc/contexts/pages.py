"""Which contexts a request means: one by name, or a page of all, whose next one travels in a signed token (AIP-158)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json

from decode_engine.rpc.contexts.context_fields import row_of
from decode_engine.rpc.contexts.filters import parse_filter
from decode_engine.rpc.contexts.names import parse_name
from decode_engine.rpc.contexts.ordering import Key, parse_order
from index_store.errors import ContextNotFoundError, InvalidArgumentError
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.listing import Entry
from sparsekv.v1 import context_pb2

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
MAX_REFERENCE_CHARACTERS = 600

_SIGNATURE_BYTES = 16


def find_context(store: Store, request: context_pb2.GetContextRequest, model: str) -> Entry:
    """The context that a request names or calls something. model: whose contexts are meant first, by its fingerprint.

    Raises InvalidArgumentError, ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
    """
    if bool(request.name) == bool(request.reference):
        raise InvalidArgumentError("give exactly one of name, reference", field="name")
    if len(request.reference) > MAX_REFERENCE_CHARACTERS:
        raise InvalidArgumentError(
            f"reference has {len(request.reference)} characters, expected at most {MAX_REFERENCE_CHARACTERS}",
            field="reference",
        )
    return store.entry(parse_name(request.name) if request.name else store.resolve(request.reference, model))


class Pager:
    """Cuts lists of contexts into pages. Tokens are valid for pagers with the same key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def page(self, store: Store, request: context_pb2.ListContextsRequest) -> tuple[list[Entry], str]:
        """One page of the contexts that fit the filter, and the token of the next one ("" for the last page).

        A page starts after the last entry of the page before, wherever that entry would stand now. Its entries are as
        they are now: those that were deleted meanwhile are left out. Raises InvalidArgumentError for a negative size, a
        filter or an order that cannot be read, or a token of another origin or another list.
        """
        size, asked = request.page_size, (request.filter, request.order_by)
        if size < 0:
            raise InvalidArgumentError(f"page_size is {size}, expected 0 or more", field="page_size")
        size = min(size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        fits, order = parse_filter(request.filter), parse_order(request.order_by)
        last = self._read(request.page_token, asked) if request.page_token else None
        rows = (
            row_of(entry, expired=isinstance(entry, Manifest) and store.expired(entry))
            for entry in store.entries()
        )
        found = order.after([row for row in rows if fits(row)], last)
        listed = found[:size]
        token = self._write(order.key(listed[-1]), asked) if size < len(found) else ""
        page = []
        for row in listed:
            try:
                page.append(store.entry(row.entry.id))
            except ContextNotFoundError:
                continue
        return page, token

    def _write(self, key: Key, asked: tuple[str, str]) -> str:
        payload = json.dumps([key, asked]).encode()
        return base64.urlsafe_b64encode(self._sign(payload) + payload).decode()

    def _read(self, token: str, asked: tuple[str, str]) -> Key:
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
        (values, (broken, age, id_)), of = json.loads(payload)
        if tuple(of) != asked:
            raise InvalidArgumentError(
                "page_token is of a list with another filter or order_by; pass the same as for the previous page, or "
                "start again without a token",
                field="page_token",
            )
        return tuple(values), (broken, age, id_)

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, hashlib.sha256)[:_SIGNATURE_BYTES]
