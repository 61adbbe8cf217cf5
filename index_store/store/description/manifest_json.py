"""Manifests as bytes: canonical JSON with a checksum over itself.

`format_version` and `checksum` mean the same in every version of the format, so that a newer manifest is told
apart from a damaged one: the checksum is crc32c over the canonical JSON of all other fields.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import google_crc32c

from index_store.attention.layer_shape import WindowLayers
from index_store.errors import ChecksumError, FormatVersionError, ManifestError
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.context_id import ModelIdentity, Parent
from index_store.store.description.json_fields import JsonFields, field_error, is_integer, shown
from index_store.store.description.manifest import FORMAT_VERSION, READABLE_VERSIONS, IndexEntry, Manifest

MANIFEST_NAME = "manifest.json"
_INDENT = re.compile(rb"\n *(?=[^\n ])")
_REPAIR = "delete the context (`index-store rm`) and make it again: prefill its document, or continue its parent anew"


def render_manifest(manifest: Manifest) -> bytes:
    """The contents of `manifest.json`: always the same bytes for the same manifest.

    Raises ManifestError when an array has no checksums: it was not written yet.
    """
    for entry in manifest.arrays:
        if entry.checksums is None:
            raise field_error(
                f"{entry.path}.checksums", None, "a checksum per chunk, as the writer adds them"
            )
    document = asdict(manifest)
    document["created_at"] = manifest.created_at.isoformat()
    document["expires_at"] = manifest.expires_at.isoformat() if manifest.expires_at else None
    document["format_version"] = FORMAT_VERSION
    if manifest.model.window is None:  # then nothing is said about windows, as before there were any
        del document["model"]["window"], document["window"]
    for name in (
        "conversation",
        "labels",
        "pinned",
        "owner",
        "parent",
        "prefix_digests",
    ):  # said where there is something to say
        if not document[name]:
            del document[name]
    return render_document(document)


def render_document(document: dict[str, object]) -> bytes:
    """A manifest's JSON object (without its checksum) as sealed bytes."""
    sealed = {"checksum": _checksum(document), **document}
    return (json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Reads `manifest.json`; `where` names the file in errors.

    Raises ManifestError (not JSON, or a field that is missing, unknown or wrong), ChecksumError (altered since it
    was written) or FormatVersionError (written by another version of the format).
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: manifest is not JSON ({error}); {_REPAIR}", path=where) from None
    if not isinstance(document, dict):
        raise _with_advice(field_error("manifest", document, "a JSON object"), where)
    found = document.pop("checksum", None)
    version = document.get("format_version")
    foreign = isinstance(version, int) and is_integer(version) and version not in READABLE_VERSIONS
    if not (foreign and found is None):
        _check_seal(document, found, data, where)
    if isinstance(version, int) and foreign:
        advice = (
            "the context was made by an older sparsekv: prefill the document again and delete the old context "
            "(`index-store rm`)"
            if version < READABLE_VERSIONS[0]
            else "update sparsekv, or delete the context (`index-store rm`) and prefill the document again"
        )
        raise FormatVersionError(
            f"{where}: format version {version}, this program reads versions {READABLE_VERSIONS[0]} to "
            f"{FORMAT_VERSION}; {advice}",
            found=version,
            expected=FORMAT_VERSION,
            path=where,
        )
    try:
        return _parse_document(document, where)
    except ManifestError as error:
        raise _with_advice(error, where) from None


def _with_advice(error: ManifestError, where: str) -> ManifestError:
    """The error of a field with the file's name in front and what to do at its end."""
    message = error.message.removeprefix(f"{where}: ")
    return ManifestError(f"{where}: {message}; {_REPAIR}", **{**error.metadata, "path": where})


def _checksum(document: dict[str, object]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{google_crc32c.value(canonical.encode('ascii')):08x}"


def _check_seal(document: dict[str, object], found: object, data: bytes, where: str) -> None:
    try:
        expected = _checksum(document)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{where}: manifest holds a value that is not JSON ({error}); {_REPAIR}", path=where
        ) from None
    if found is None:
        raise ChecksumError(
            f"{where}: manifest has no field 'checksum', expected crc32c {expected}; {_REPAIR}",
            found=found,
            expected=expected,
            path=where,
            array="manifest",
        )
    # Comparing the bytes as well finds damage that JSON does not see: white space, duplicate keys, escapes. Without
    # indents, since those take longer to write than all the rest takes to read.
    sealed = json.dumps({"checksum": found, **document}, sort_keys=True, separators=(",", ": "))
    if found != expected or _INDENT.sub(b"", data) != sealed.encode("ascii") + b"\n":
        raise ChecksumError(
            f"{where}: manifest has crc32c {expected}, expected {shown(found)}; "
            f"the file was altered or damaged: {_REPAIR}",
            found=expected,
            expected=shown(found),
            path=where,
            array="manifest",
        )


def _parse_document(document: dict[str, object], where: str) -> Manifest:
    fields = JsonFields(document, where)
    if document.get("format_version") == 2:
        fields.digits("salt")  # which only the id needs to know
    manifest = Manifest(
        format_version=fields.integer("format_version"),
        id=fields.text("id"),
        name=fields.text("name"),
        created_at=fields.time("created_at"),
        expires_at=fields.optional_time("expires_at"),
        model=fields.item("model", _parse_model),
        dtype=fields.text("dtype"),
        token_count=fields.integer("token_count"),
        methods=fields.texts("methods"),
        dense_layers=fields.integers("dense_layers"),
        selection_errors=fields.numbers("selection_errors"),
        tokens=fields.item("tokens", _parse_array),
        kv=fields.item("kv", _parse_array),
        indexes=fields.items("indexes", _parse_index),
        prefill=fields.scalars("prefill"),
        seconds=fields.numbers_by_name("seconds"),
        queries=fields.optional_item("queries", _parse_array),
        query_positions=fields.integers("query_positions"),
        window=fields.optional_item("window", _parse_array) if fields.has("window") else None,
        parent=fields.item("parent", _parse_parent) if fields.has("parent") else None,
        prefix_digests=fields.digits("prefix_digests") if fields.has("prefix_digests") else "",
        conversation=fields.item("conversation", _parse_array) if fields.has("conversation") else None,
        labels=fields.texts_by_name("labels") if fields.has("labels") else {},
        pinned=fields.has("pinned") and fields.flag("pinned"),
        owner=fields.text("owner") if fields.has("owner") else "",
    )
    fields.finish()
    return manifest


def _parse_parent(fields: JsonFields) -> Parent:
    return Parent(id=fields.text("id"), token_count=fields.integer("token_count"))


def _parse_model(fields: JsonFields) -> ModelIdentity:
    return ModelIdentity(
        name=fields.text("name"),
        architecture=fields.text("architecture"),
        fingerprint=fields.text("fingerprint"),
        tokenizer_fingerprint=fields.text("tokenizer_fingerprint"),
        layers=fields.integer("layers"),
        query_heads=fields.integer("query_heads"),
        kv_heads=fields.integer("kv_heads"),
        head_dim=fields.integer("head_dim"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_positions"),
        window=fields.item("window", _parse_window) if fields.has("window") else None,
    )


def _parse_window(fields: JsonFields) -> WindowLayers:
    return WindowLayers(
        layers=fields.integers("layers"),
        size=fields.integer("size"),
        query_heads=fields.integer("query_heads"),
        kv_heads=fields.integer("kv_heads"),
        head_dim=fields.integer("head_dim"),
    )


def _parse_array(fields: JsonFields) -> ArrayEntry:
    return ArrayEntry(
        path=fields.text("path"),
        shape=fields.integers("shape"),
        chunks=fields.integers("chunks"),
        dtype=fields.text("dtype"),
        checksums=fields.digits("checksums"),
    )


def _parse_index(fields: JsonFields) -> IndexEntry:
    return IndexEntry(
        name=fields.text("name"),
        kind=fields.text("kind"),
        parameters=fields.scalars("parameters"),
        layers=fields.integers("layers"),
        arrays=fields.items("arrays", _parse_array),
        thresholds=fields.numbers("thresholds"),
    )
