"""Multipole Semantic Attention (MuSe): attention approximated by clusters of queries and of keys, in two stages."""

from prefill_worker.muse.attention import muse_attention
from prefill_worker.muse.settings import MuseSettings

__all__ = ["MuseSettings", "muse_attention"]
