"""The modules of kernels of one warp, and those that launch them, for `warp_launches.interpreted`."""

from __future__ import annotations

from decode_engine.kernels.coarse import coarse_pass, search
from decode_engine.kernels.coarse.warp import (
    warp_codes,
    warp_cut,
    warp_findings,
    warp_pass,
    warp_places,
    warp_records,
    warp_rings,
    warp_rows,
    warp_sample,
    warp_tiles,
    warp_values,
)

WARP_MODULES = (
    warp_pass, warp_values, warp_cut, warp_sample, warp_records, warp_rings, warp_tiles, warp_places,
    warp_codes, warp_rows, warp_findings, search, coarse_pass,
)  # fmt: skip
