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

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidArgumentError(SparseKVError):
    """A parameter is out of its documented range or cannot be parsed."""

    reason = "INVALID_ARGUMENT"


class PermissionDeniedError(SparseKVError):
    """The caller may not do that, to what it knows of anyway."""

    reason = "PERMISSION_DENIED"


class StoreError(SparseKVError):
    """The store's folder cannot be used (missing, not writable, not a store)."""

    reason = "STORE_UNUSABLE"


class StoreFullError(StoreError):
    """The disk filled up while a context was written; nothing visible was left."""

    reason = "STORE_FULL"


class StoreBoundError(SparseKVError):
    """A context does not fit into what the store may hold, and nothing that may go makes room for it."""

    reason = "STORE_BOUND_REACHED"


class QuotaExceededError(SparseKVError):
    """A tenant has used up what its quota allows; the metadata name the limit, what is used, wanted and allowed."""

    reason = "QUOTA_EXCEEDED"

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


class StoreUnavailableError(StoreError):
    """A file of the store cannot be read now (permissions, open files, a disk or server that does not answer).

    Nothing is known to be damaged: the same read may succeed later.
    """

    reason = "STORE_UNAVAILABLE"


class ContextNotFoundError(SparseKVError):
    reason = "CONTEXT_NOT_FOUND"


class ContextAmbiguousError(SparseKVError):
    """A name or an id prefix fits more than one context."""

    reason = "CONTEXT_AMBIGUOUS"


class NameTakenError(SparseKVError):
    """A name belongs to another context."""

    reason = "NAME_TAKEN"


class ContextBusyError(SparseKVError):
    """A job changes the context, and does not let go of it in time."""

    reason = "CONTEXT_BUSY"


class ContextExpiredError(SparseKVError):
    reason = "CONTEXT_EXPIRED"


class ContextHasChildrenError(SparseKVError):
    """A context cannot be removed because others continue it and need its keys and values."""

    reason = "CONTEXT_HAS_CHILDREN"

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


class ContextCorruptError(SparseKVError):
    """Stored bytes were read and are not what was written; the message names file and array."""

    reason = "CONTEXT_CORRUPT"


class ChecksumError(ContextCorruptError):
    """A chunk's crc32c differs from the one at its file's end or from the one that the manifest records."""

    reason = "CHECKSUM_MISMATCH"


class TruncatedChunkError(ContextCorruptError):
    """A chunk file is shorter or longer than its array says."""

    reason = "CHUNK_TRUNCATED"


class MissingChunkError(ContextCorruptError):
    """A chunk file that the manifest promises is not there."""

    reason = "CHUNK_MISSING"


class UnexpectedFileError(ContextCorruptError):
    """A file lies in a context's folder that the manifest does not list; nothing reads it."""

    reason = "FILE_UNEXPECTED"


class ContextFileError(ContextCorruptError):
    """One file with a whole context in it is not what was written, is cut, or is another kind of file."""

    reason = "CONTEXT_FILE_INVALID"


class ParentMissingError(ContextCorruptError):
    """A child's parent is not in the store, or is not the context that the child continues."""

    reason = "PARENT_MISSING"

    @classmethod
    def of(cls, child: str, parent: str, state: str) -> Self:
        """The error of a child. state: what its parent is."""
        return cls(
            f"context {child} continues context {parent}, which {state}; delete it and make it again",
            context=child,
            parent=parent,
        )


class ManifestError(ContextCorruptError):
    """The manifest cannot be parsed; the message names field, value and path."""

    reason = "MANIFEST_INVALID"


class FormatVersionError(SparseKVError):
    """The context was written in a format version that this program does not read."""

    reason = "FORMAT_VERSION_UNSUPPORTED"


class ModelMismatchError(SparseKVError):
    """The context was prefilled by another model or tokenizer."""

    reason = "MODEL_MISMATCH"


class DtypeMismatchError(SparseKVError):
    """The context's keys and values are stored in another dtype than the engine runs with."""

    reason = "DTYPE_MISMATCH"


class ModelUnsupportedError(SparseKVError):
    """The model folder is missing files or its architecture cannot be served."""

    reason = "MODEL_UNSUPPORTED"


class FetchError(SparseKVError):
    """A model cannot be fetched, or not all of it."""

    reason = "MODEL_NOT_FETCHED"


class MethodUnsupportedError(SparseKVError):
    """The method is unknown, or the context has no index that it can use."""

    reason = "METHOD_UNSUPPORTED"


class MemoryBudgetError(SparseKVError):
    """A context does not fit into the memory budget, even with everything else evicted."""

    reason = "MEMORY_BUDGET_EXCEEDED"


class ArrayMetadataError(ContextCorruptError):
    """An array's `zarr.json` is missing, unreadable or says something else than the manifest."""

    reason = "ARRAY_METADATA_INVALID"


class JobNotFoundError(SparseKVError):
    """There is no job, and so no operation, of that name."""

    reason = "OPERATION_NOT_FOUND"


class JobUnfinishedError(SparseKVError):
    """The job has not ended, and what was asked for needs that."""

    reason = "OPERATION_UNFINISHED"


class JobCorruptError(SparseKVError):
    """A file of a queued job was read and is not what was written, or is of another format; other jobs go on."""

    reason = "OPERATION_CORRUPT"


class JobLostError(SparseKVError):
    """Every worker that took the job ended before it had come any further."""

    reason = "WORKERS_LOST"


class QueueFullError(SparseKVError):
    """The queue of prefill jobs holds as many jobs, or as large documents, as it may."""

    reason = "QUEUE_FULL"


class UploadNotFoundError(SparseKVError):
    """There is no uploaded document of that name: it was used, has expired, or never was."""

    reason = "UPLOAD_NOT_FOUND"
