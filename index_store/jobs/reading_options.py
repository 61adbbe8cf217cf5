"""What, besides model, dtype, salt and tokens, decides what a context is before any index is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from index_store.store.description.dtypes import AS_DTYPE

DENSE_KEEP = 0.02
"""Share of the keys that the exact selection may have by which layers are found that stay dense."""

DENSE_ERROR = 0.1
"""Relative output error above which such a layer stays dense."""


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How a document is read; the defaults are those of `prefill-worker run` and of contexts made over the network.

    dense_layers: those that are given; None to find them out. query_sample: queries per layer and KV head. calibration:
    fingerprint of the calibration prompts, "" without any. approximation: settings of approximate attention, None where
    it is exact. rows: how exact rows are stored, one of `ROW_CODINGS`.
    """

    dense_layers: tuple[int, ...] | None = None
    query_sample: int = 8192
    seed: int = 0
    calibration: str = ""
    approximation: Mapping[str, object] | None = None
    rows: str = AS_DTYPE

    def describe(self) -> dict[str, object]:
        """As it counts for a context's id."""
        automatic = {"keep": DENSE_KEEP, "threshold": DENSE_ERROR}
        return {
            "dense_layers": automatic if self.dense_layers is None else list(self.dense_layers),
            "query_sample": self.query_sample,
            "seed": self.seed,
            "calibration": self.calibration,
            **({} if self.approximation is None else {"attention": self.approximation}),
            **({} if self.rows == AS_DTYPE else {"rows": self.rows}),
        }
