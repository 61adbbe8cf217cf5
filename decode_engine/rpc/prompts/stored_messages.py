"""Messages and tokens of a stored context, for those that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from index_store.family.parents import parent_of
from index_store.models.conversation.turns import StoredConversation
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StoredMessages:
    """What a stored context was made of, read from the store when it is asked for."""

    store: Store
    manifest: Manifest

    def conversation(self) -> StoredConversation | None:
        """Its messages; None where it was made of a text or of tokens. Raises what reading a context raises."""
        if self.manifest.conversation is None:
            return None
        with self.store.files(self.manifest) as context:
            data = context.conversation()
        return StoredConversation.from_bytes(data or b"", f"context {self.manifest.id}")

    def tokens(self) -> Sequence[int]:
        """Its token ids, with those of the context that it continues. Raises ParentMissingError, too."""
        base = parent_of(self.store, self.manifest)
        ids: list[int] = []
        for manifest in (base, self.manifest):
            if manifest is not None:
                with self.store.files(manifest) as context:
                    ids += context.token_ids().tolist()
        return ids
