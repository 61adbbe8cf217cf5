"""A small file replaced all at once: readers see the old contents or the new ones, whatever happens."""

from __future__ import annotations

import os
from pathlib import Path

from index_store.errors import ContextNotFoundError, StoreError
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    new_file,
    permissions_in,
    storing,
    sync_path,
    unused_name,
)
from index_store.store.files.locks import locked_file


def replace_file(path: Path, data: bytes, folder: Path, locks: Path) -> None:
    """Replaces a file of a context's folder durably, through a temporary one in `folder`, on the same file system.

    locks: where a lock of the temporary file's name says that it is no dead writer's. Raises ContextNotFoundError where
    the context's folder was removed, StoreFullError or StoreError where the file cannot be written.
    """
    temporary = unused_name(folder, f"{TEMPORARY_PREFIX}{path.parent.name}")
    with locked_file(locks / temporary.name):
        try:
            with storing("writing", path):
                with new_file(temporary, permissions_in(folder)) as file:
                    file.write(data)
                sync_path(temporary)
                os.replace(temporary, path)
                sync_path(path.parent)
        except StoreError as error:
            if path.parent.is_dir():
                raise
            id_ = path.parent.name
            raise ContextNotFoundError(
                f"context {id_} was deleted while it was being changed", context=id_
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
