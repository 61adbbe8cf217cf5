"""Stored contexts and methods as the API's messages."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from decode_engine.session import require_index
from index_store.catalog import BrokenContext
from index_store.errors import FormatVersionError, SparseKVError
from index_store.manifest import IndexEntry, Manifest
from index_store.methods import METHODS, Method
from sparsekv.v1 import context_pb2, generation_pb2

COLLECTION = "contexts/"


def supported_methods(manifest: Manifest) -> list[str]:
    """Names of the methods that find what they search in the context."""
    names = []
    for method in METHODS.values():
        try:
            require_index(manifest, method)
        except SparseKVError:
            continue
        names.append(method.name)
    return names


def default_method(manifest: Manifest) -> str:
    """The first supported method of those that the context was prefilled for; "full" when there is none."""
    supported = supported_methods(manifest)
    return next((name for name in manifest.methods if name in supported), "full")


def describe_context(manifest: Manifest, *, expired: bool, resident: bool) -> context_pb2.Context:
    """A readable context as the API shows it."""
    states = context_pb2.Context
    return context_pb2.Context(
        name=COLLECTION + manifest.id,
        display_name=manifest.name,
        model=manifest.model.name,
        architecture=manifest.model.architecture,
        token_count=manifest.token_count,
        dtype=manifest.dtype,
        kv_bytes=manifest.kv_bytes,
        index_bytes=manifest.index_bytes,
        state=states.EXPIRED if expired else states.READY,
        create_time=_timestamp(manifest.created_at),
        expire_time=None if manifest.expires_at is None else _timestamp(manifest.expires_at),
        resident=resident,
        methods=supported_methods(manifest),
        default_method=default_method(manifest),
        indexes=[_describe_index(index, manifest.token_count) for index in manifest.indexes],
        dense_layers=manifest.dense_layers,
    )


def describe_broken(broken: BrokenContext) -> context_pb2.Context:
    """A context whose metadata cannot be read."""
    states = context_pb2.Context
    newer = isinstance(broken.error, FormatVersionError)
    return context_pb2.Context(
        name=COLLECTION + broken.id,
        state=states.UNSUPPORTED if newer else states.CORRUPT,
        state_message=broken.error.message,
    )


def describe_method(method: Method) -> generation_pb2.Method:
    """A method as the API shows it."""
    return generation_pb2.Method(
        name=method.name,
        summary=method.summary,
        source=method.source,
        indexes=[method.index.name] if method.index is not None and method.index.stored else [],
        keep_ratio=method.budget.keep if method.budget else None,
    )


def _describe_index(index: IndexEntry, token_count: int) -> context_pb2.Context.Index:
    return context_pb2.Context.Index(
        name=index.name,
        kind=index.kind,
        parameters={name: str(value) for name, value in index.parameters.items()},
        bytes_per_token=index.nbytes / token_count,
        layers=index.layers,
    )


def _timestamp(time: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(time)
    return stamp
