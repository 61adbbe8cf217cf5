"""Records of every kind of sealed file, as objects; `recorded` has the bytes that each was written as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from google.protobuf.json_format import MessageToDict

from decode_engine.rpc.describe import describe_context
from decode_engine.rpc.door.access import TOKENS, Token, Tokens
from index_store.jobs.job_record import JOBS, JobFailure, JobOrder, JobPhase, JobProgress, JobRecord, JobState
from index_store.memory.context_loading import placed_bytes
from index_store.methods.method import INDEX_SPECS
from index_store.store.catalog import DEFAULTS, Store, TunedDefault
from index_store.store.description.array_entry import (
    conversation_entry,
    index_array_entry,
    kv_entry,
    queries_entry,
    tokens_entry,
    window_entry,
)
from index_store.store.description.context_id import Parent, WindowLayers
from index_store.store.description.json_fields import Sealed
from index_store.store.description.manifest import MANIFESTS, IndexEntry, Manifest
from index_store.store.files.leftovers import WHOLE
from prefill_worker.build.checkpoint import CHECKPOINTS, KeptArray, KeptChunk, LayerRecord
from prefill_worker.build.dense_layers import Selectivity
from tests.support.store import (
    CREATED,
    MODEL,
    RETIRED_INDEXES,
    THRESHOLDS,
    in_planes,
    other_model,
    synthetic_context,
)

RECORDED = Path(__file__).parent / "recorded"
CONTEXT = "5" * 64

_INDEXES = {spec.name: (spec.kind, spec.parameters) for spec in INDEX_SPECS.values()} | RETIRED_INDEXES
_WHEN_RECORDED = (
    *("query_tables", "paper_tables", "key_clusters", "windowed_clusters", "cluster_tree"),
    "remainder_clusters",
    *("dipole_clusters", "pages", "product_codes", "coarse_rows", "coarse_rows_3", "coarse_codes"),
)
"""Those that there were when the manifest was recorded; one that is listed later changes nothing."""

_EVERY_KIND = tuple(
    IndexEntry(
        name,
        *_INDEXES[name],
        (1, 2),
        (index_array_entry(name, "rows", 2, (MODEL.kv_heads, 3), "uint8"),),
        THRESHOLDS if name == "pages" else (),
    )
    for name in _WHEN_RECORDED
)


def _sealed(manifest: Manifest) -> Manifest:
    """With checksums of no contents in particular."""
    return manifest.with_checksums(
        {
            entry.path: "".join(f"{at:08x}" for at, _ in enumerate(entry.chunk_indices()))
            for entry in manifest.arrays
        }
    )


def _manifests() -> dict[str, Manifest]:
    plain = synthetic_context(tokens=300, ttl=timedelta(days=3)).draft
    every_kind = replace(
        plain,
        indexes=_EVERY_KIND,
        name="Größe „2“",
        labels={"team": "law", "b.c": ""},
        pinned=True,
        owner="alice",
        prefix_digests="0f" * 32,
        conversation=conversation_entry(9),
        prefill={"chunk": 2048, "calibration": False, "share": 1e-7, "note": "é", "big": 2**53 + 1},
        seconds={"forward": 1.5, "index": 2},
    )
    windows = other_model(window=WindowLayers((0, 2), 8, 4, 2, 8))
    windowed = replace(
        synthetic_context(tokens=20).draft,
        model=windows,
        indexes=(),
        kv=kv_entry(windows, 20, "bfloat16"),
        window=window_entry(windows, 20, "bfloat16"),
        queries=queries_entry(windows, 3),
        dense_layers=(),
    )
    all_windows = other_model(window=WindowLayers((0, 1, 2), 8, 4, 2, 8))
    short = replace(
        windowed,
        model=all_windows,
        kv=kv_entry(all_windows, 20, "bfloat16"),
        window=None,
        queries=None,
        query_positions=(),
    )
    child = replace(
        plain,
        id="c" * 64,
        expires_at=None,
        parent=Parent(plain.id, 290),
        tokens=tokens_entry(10),
        kv=kv_entry(MODEL, 10, "bfloat16", whole=False),
        indexes=(),
        queries=None,
        query_positions=(),
        selection_errors=(),
    )
    whole = replace(
        child,
        parent=None,
        tokens=tokens_entry(300).below(WHOLE),
        kv=kv_entry(MODEL, 300, "bfloat16").below(WHOLE),
    )
    named = {
        "every_kind": every_kind,
        "in_8_bits": in_planes(plain),
        "windowed": windowed,
        "all_windows": short,
        "child": child,
        "whole": whole,
        "owned": replace(plain, tenant="acme", readers=("b.c@d-9", "*")),
    }
    return {name: _sealed(manifest) for name, manifest in named.items()}


def _jobs() -> dict[str, JobRecord]:
    order = JobOrder("7" * 64, "f" * 64, "toy", "", "title", ("csattention",), "float32", None, 3)
    opened = JobRecord("0" * 31 + "1", order, CREATED)
    everything = replace(
        order,
        name="n",
        methods=("csattention", "quest"),
        ttl=60,
        conversation="d" * 64,
        parent="e" * 64,
        owner="bob",
        labels={"team": "law"},
        whole=True,
        rows="int8",
        moves=True,
    )
    held = replace(
        opened,
        order=everything,
        request="r-1",
        digest="9" * 64,
        priority=-3,
        progress=JobProgress(JobPhase.INDEXING, 3, 1, 3, 4096, 1.5),
        attempts=2,
        notes=("went on",),
        furthest=(3, 1),
    )
    ended = {"created_at": CREATED, "ended_at": CREATED + timedelta(seconds=61)}
    failure = JobFailure("CONTEXT_CORRUPT", "„x“: damaged", {"path": "p", "cause": "CHECKSUM_MISMATCH"})
    return {
        "open": opened,
        "owned": replace(opened, order=replace(order, tenant="acme")),
        "held": held,
        "done": replace(opened, state=JobState.DONE, **ended),
        "failed": replace(opened, state=JobState.FAILED, failure=failure, **ended),
        "cancelled": replace(opened, state=JobState.CANCELLED, **ended),
    }


_DEFAULTS = {
    "keep": TunedDefault(
        CONTEXT, "csattention@period=2", 0.0125, None, None, "mass", 0.99, {"mass": 0.991, "keys": 1}, CREATED
    ),
    "tokens": TunedDefault(CONTEXT, "quest", None, None, 512, "kl", 1, {}, CREATED),
}
_TOKENS = Tokens(
    tuple(
        Token(name, bytes(range(at, at + 32)).hex(), datetime(2026, 5, 6, 7, 8, at, tzinfo=UTC))
        for at, name in enumerate(("alice", "b.c_d-9"))
    )
)
_OF_TENANTS = replace(
    _TOKENS.tokens[0], tenant="acme", rights=("read", "delete"), expires_at=CREATED + timedelta(days=90)
)
_CHECKPOINT = CHECKPOINTS.parse((RECORDED / "checkpoint.json").read_bytes(), "recorded")

KINDS: Mapping[str, tuple[Sealed[Any], object]] = {
    **{f"manifest-{name}": (MANIFESTS, each) for name, each in _manifests().items()},
    **{f"job-{name}": (JOBS, each) for name, each in _jobs().items()},
    **{f"default-{name}": (DEFAULTS, each) for name, each in _DEFAULTS.items()},
    "tokens": (TOKENS, _TOKENS),
    "tokens-owned": (TOKENS, Tokens((_OF_TENANTS,))),
    "checkpoint": (CHECKPOINTS, _CHECKPOINT),
}
"""Each kind of file, and a record, by the name of the file in `recorded`."""


def use(record: object) -> None:
    """Does with one what listing, showing, placing and describing its context does."""
    if isinstance(record, TunedDefault):
        MessageToDict(describe_context(synthetic_context().manifest, record, expired=False, resident=False))
    elif isinstance(record, Manifest):
        MessageToDict(describe_context(record, expired=False, resident=False))
        placed_bytes(record)


LAYER = LayerRecord(
    (KeptChunk("kv", (1, 0), 4294967295), KeptChunk("index/pages/rows", (0, 1), 7)),
    {"pages": (KeptArray("rows", (2, 3), "uint8"),), "codes": ()},
    {"pages": (torch.tensor([3]), 12), "codes": (torch.zeros(1), 0)},
    Selectivity(0.5, 0.25),
)


def write_context(path: Path) -> None:
    """Publishes a context of known contents in a store."""
    context = synthetic_context(tokens=5, index_dtypes=("uint8", "bfloat16"))
    for tensor in (context.kv, context.queries, *context.arrays.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 64)
    context.tokens.copy_(torch.arange(5))
    context.write(Store(path))


def json_files(path: Path) -> dict[str, str]:
    """Contents of all JSON files of a store's contexts, by their names."""
    return {
        file.relative_to(path).as_posix(): file.read_text() for file in (path / "contexts").rglob("*.json")
    }
