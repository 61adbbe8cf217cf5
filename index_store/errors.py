"""Every error a stored context can raise. Each carries a stable reason that the service passes on to clients."""

from __future__ import annotations

from typing import ClassVar, Self

REPAIR = "delete the context and make it again: prefill its document, or continue its parent anew"
"""What to do about a context that is damaged, as errors say it."""


def format_bytes(count: float) -> str:
    """A size as errors, logs and commands say it, with a binary unit: 1536 -> '1.5 KiB'."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


class SparseKVError(Exception):
    """Base of all errors raised on bad input or bad data.

    The message says what was found, what was expected and what to do. `reason` is stable and machine-readable
    (UPPER_SNAKE_CASE, unique per class); `metadata` holds the values named in the message. `retry_after_s`: seconds
    after which the same call may succeed, where somebody knows.
    """

    reason: ClassVar[str] = "INTERNAL"
    retry_after_s: float | None = None

    def __init_subclass__(cls, *, reason: str | None = None) -> None:
        super().__init_subclass__()
        cls.reason = reason or cls.reason

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidArgumentError(SparseKVError, reason="INVALID_ARGUMENT"):
    """A parameter is out of its documented range or cannot be parsed."""


class PermissionDeniedError(SparseKVError, reason="PERMISSION_DENIED"):
    """The caller may not do that, to what it knows of anyway."""


class StoreError(SparseKVError, reason="STORE_UNUSABLE"):
    """The store's folder cannot be used (missing, not writable, not a store)."""


class StoreFullError(StoreError, reason="STORE_FULL"):
    """The disk filled up while a context was written; nothing visible was left."""


class StoreBoundError(SparseKVError, reason="STORE_BOUND_REACHED"):
    """A context does not fit into what the store may hold, and nothing that may go makes room for it."""


class QuotaExceededError(SparseKVError, reason="QUOTA_EXCEEDED"):
    """A tenant has used up what its quota allows; the metadata name the limit, what is used, wanted and allowed."""

    @classmethod
    def of(
        cls, limit: str, found: int, wanted: int, allowed: int, retry_after_s: float | None = None
    ) -> Self:
        """The error of a tenant that has `found` of what the limit allows, and wants more.

        retry_after_s: when there may be enough; None where waiting does not help.
        """
        shown = format_bytes if limit.endswith("_bytes") else "{:,}".format
        when = "" if retry_after_s is None else f"; come back in {max(1, round(retry_after_s))} s"
        error = cls(
            f"the tenant's quota of {limit} is {shown(allowed)}, of which {shown(found)} are used, and this takes "
            f"{shown(wanted)} more{when}",
            limit=limit,
            found=found,
            wanted=wanted,
            allowed=allowed,
        )
        error.retry_after_s = retry_after_s
        return error


class StoreUnavailableError(StoreError, reason="STORE_UNAVAILABLE"):
    """A file of the store cannot be read now (permissions, open files, a disk or server that does not answer).

    Nothing is known to be damaged: the same read may succeed later.
    """


class ObjectsUnavailableError(StoreUnavailableError, reason="OBJECTS_UNAVAILABLE"):
    """The object store does not answer, or refuses. Nothing is known to be damaged."""


class ContextElsewhereError(SparseKVError, reason="CONTEXT_ELSEWHERE"):
    """A context's keys and values are in an object store that this program was not told of."""


class ContextFetchingError(SparseKVError, reason="CONTEXT_FETCHING"):
    """A context is being fetched from an object store, for longer than the caller wanted to wait; it comes on."""


class ContextNotFoundError(SparseKVError, reason="CONTEXT_NOT_FOUND"):
    """No context is what was asked for."""


class ContextAmbiguousError(SparseKVError, reason="CONTEXT_AMBIGUOUS"):
    """A name or an id prefix fits more than one context."""


class NameTakenError(SparseKVError, reason="NAME_TAKEN"):
    """A name belongs to another context."""


class ContextBusyError(SparseKVError, reason="CONTEXT_BUSY"):
    """A job changes the context, and does not let go of it in time."""


class ContextExpiredError(SparseKVError, reason="CONTEXT_EXPIRED"):
    """The context has expired, and goes."""


class ContextHasChildrenError(SparseKVError, reason="CONTEXT_HAS_CHILDREN"):
    """A context cannot be removed because others continue it and need its keys and values."""

    @classmethod
    def of(cls, id_: str, children: int) -> Self:
        """The error of a context that has so many."""
        continue_it = "1 context continues" if children == 1 else f"{children} contexts continue"
        return cls(
            f"context {id_} has children: {continue_it} it and would be lost; remove them before it, or with it "
            "(--recursive; force in requests), or make them stand alone (`prefill-worker detach`)",
            context=id_,
            children=children,
        )


class ContextCorruptError(SparseKVError, reason="CONTEXT_CORRUPT"):
    """Stored bytes were read and are not what was written; the message names file and array."""


class ChecksumError(ContextCorruptError, reason="CHECKSUM_MISMATCH"):
    """A chunk's crc32c differs from the one at its file's end or from the one that the manifest records."""


class TruncatedChunkError(ContextCorruptError, reason="CHUNK_TRUNCATED"):
    """A chunk file is shorter or longer than its array says."""


class MissingChunkError(ContextCorruptError, reason="CHUNK_MISSING"):
    """A chunk file that the manifest promises is not there."""


class UnexpectedFileError(ContextCorruptError, reason="FILE_UNEXPECTED"):
    """A file lies in a context's folder that the manifest does not list; nothing reads it."""


class ContextFileError(ContextCorruptError, reason="CONTEXT_FILE_INVALID"):
    """One file with a whole context in it is not what was written, is cut, or is another kind of file."""


class ParentMissingError(ContextCorruptError, reason="PARENT_MISSING"):
    """A child's parent is not in the store, or is not the context that the child continues."""

    @classmethod
    def of(cls, child: str, parent: str, state: str) -> Self:
        """The error of a child. state: what its parent is."""
        return cls(
            f"context {child} continues context {parent}, which {state}; delete it and make it again",
            context=child,
            parent=parent,
        )


class ManifestError(ContextCorruptError, reason="MANIFEST_INVALID"):
    """The manifest cannot be parsed; the message names field, value and path."""


class FormatVersionError(SparseKVError, reason="FORMAT_VERSION_UNSUPPORTED"):
    """The context was written in a format version that this program does not read."""


class ModelMismatchError(SparseKVError, reason="MODEL_MISMATCH"):
    """The context was prefilled by another model or tokenizer."""


class DtypeMismatchError(SparseKVError, reason="DTYPE_MISMATCH"):
    """The context's keys and values are stored in another dtype than the engine runs with."""


class ModelUnsupportedError(SparseKVError, reason="MODEL_UNSUPPORTED"):
    """The model folder is missing files or its architecture cannot be served."""


class FetchError(SparseKVError, reason="MODEL_NOT_FETCHED"):
    """A model cannot be fetched, or not all of it."""


class MethodUnsupportedError(SparseKVError, reason="METHOD_UNSUPPORTED"):
    """The method is unknown, or the context has no index that it can use."""


class MemoryBudgetError(SparseKVError, reason="MEMORY_BUDGET_EXCEEDED"):
    """A context does not fit into the memory budget, even with everything else evicted."""


class ArrayMetadataError(ContextCorruptError, reason="ARRAY_METADATA_INVALID"):
    """An array's `zarr.json` is missing, unreadable or says something else than the manifest."""


class JobNotFoundError(SparseKVError, reason="OPERATION_NOT_FOUND"):
    """There is no job, and so no operation, of that name."""


class JobUnfinishedError(SparseKVError, reason="OPERATION_UNFINISHED"):
    """The job has not ended, and what was asked for needs that."""


class JobCorruptError(SparseKVError, reason="OPERATION_CORRUPT"):
    """A file of a queued job was read and is not what was written, or is of another format; other jobs go on."""


class JobLostError(SparseKVError, reason="WORKERS_LOST"):
    """Every worker that took the job ended before it had come any further."""


class QueueFullError(SparseKVError, reason="QUEUE_FULL"):
    """The queue of prefill jobs holds as many jobs, or as large documents, as it may."""


class UploadNotFoundError(SparseKVError, reason="UPLOAD_NOT_FOUND"):
    """There is no uploaded document of that name: it was used, has expired, or never was."""
