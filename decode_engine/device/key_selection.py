"""What finds keys on a GPU, for attention to lists of them.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from decode_engine.device.step_attention import StepPlan
from decode_engine.kernels.key_lists import KeyLists
from index_store.context import ResidentContext
from index_store.manifest import Manifest
from index_store.methods import Method


class KeySelection(ABC):
    """A search whose result is lists of keys, with kernels only. Buffers are made once and shared by all layers."""

    def __init__(self, plan: StepPlan) -> None:
        """Allocates the buffers."""
        self.plan = plan

    @classmethod
    @abstractmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        """Why the method's index, search options or budget cannot be searched this way, as a clause; None if they can.

        The remainder is not this class's business.
        """

    @classmethod
    @abstractmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """What a layer's record says about the searched index (field -> value)."""

    @abstractmethod
    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        """The keys of [FIRST, END) that each KV head attends to, about KEEP of them; counts of idle rows are 0.

        q_BHGD: contiguous, unscaled. The lists may be buffers that the next call overwrites; their shape is always the
        same. Never waits for the device.
        """
