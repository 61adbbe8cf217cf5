"""Manifests as JSON that tests change."""

from __future__ import annotations

import json
from typing import Any

from index_store.store.description.manifest import MANIFESTS
from tests.support.store import SyntheticContext

WHERE = "store/contexts/x/manifest.json"


def document(context: SyntheticContext) -> dict[str, Any]:
    """The manifest's JSON without its checksum, to be changed and sealed again."""
    parsed: dict[str, Any] = json.loads(MANIFESTS.render(context.manifest))
    del parsed["checksum"]
    return parsed
