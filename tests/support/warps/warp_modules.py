"""The modules of kernels of one warp, and those that launch them, for `warp_launches.interpreted`."""

from __future__ import annotations

from decode_engine.kernels.coarse import coarse_pass, search
from decode_engine.kernels.coarse.warp import (
    warp_findings,
    warp_pass,
    warp_records,
    warp_rings,
    warp_scores,
    warp_search,
    warp_values,
)
from decode_engine.kernels.coarse.warp.tiles import (
    byte_sums,
    channel_places,
    folding,
    key_tiles,
    operands,
    registers,
    value_tiles,
)

WARP_MODULES = (
    warp_pass, warp_values, warp_search, warp_records, warp_rings, value_tiles, byte_sums, channel_places,
    operands, registers, folding, key_tiles, warp_findings, warp_scores, search, coarse_pass,
)  # fmt: skip
