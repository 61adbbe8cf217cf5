"""A small file replaced all at once, or a context's folder in two steps without a pause between them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from index_store.errors import ContextNotFoundError, StoreError
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    new_file,
    permissions_in,
    remove_tree,
    set_aside,
    storing,
    sync_path,
    unused_name,
)
from index_store.store.files.locks import locked_file


def replace_file(path: Path, data: bytes, folder: Path, locks: Path) -> None:
    """Replaces a file of a context's folder durably: readers see the old contents or the new ones.

    It goes through a temporary file in `folder`, on the same file system. locks: where a lock of that file's name says
    that it is no dead writer's. Raises ContextNotFoundError where the context's folder was removed, StoreFullError or
    StoreError where the file cannot be written.
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


def move_into_place(folder: Path, target: Path, keep: Callable[[], bool]) -> None:
    """Moves a context's folder, of which all is durable, to where it is visible, durably.

    What is there already stays where `keep` says so, and the folder with it. Otherwise it is set aside, and removed
    once the new one is there: children read an expired parent on while it is made again. Raises OSError.
    """
    with ExitStack() as replaced:
        while True:
            if os.path.lexists(target):
                if keep():
                    return
                trash = set_aside(target)
                if trash is not None:
                    replaced.callback(_remove_trash, trash)
            try:
                os.rename(folder, target)
            except OSError as error:
                # Another writer of the same content was faster: decide again.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                continue
            sync_path(target.parent)
            return


def _remove_trash(trash: Path) -> None:
    with suppress(OSError):  # a clean-up removes what is left; what was published stands
        remove_tree(trash)
