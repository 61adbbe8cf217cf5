"""Product codes on a GPU: a search that lists keys.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.codes.search import search_codes
from decode_engine.kernels.codes.sizes import CodeSizes, CodeWork, code_shape
from decode_engine.kernels.families import PRODUCT_CODES
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_parts import KeySelection
from index_store.indexes.product_codes.index import ProductCodes
from index_store.indexes.product_codes.parameters import CodeParameters
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.store.description.manifest import Manifest


class CodeSelection(KeySelection):
    """Search by product codes: one list for each KV head, ascending but for the order inside a tile of 2,048 keys."""

    kind, what = ProductCodes.kind, "product codes"

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        parameters = CodeParameters.parse(self.searched(plan.method).parameters)
        self.code_plan = CodeSizes(
            plan.model.kv_heads,
            plan.group,
            plan.model.head_dim,
            parameters.subspaces,
            2**parameters.bits,
            plan.max_keys,
            strided=parameters.split == "strided",
            shape=code_shape(plan.max_keys, parameters.subspaces, plan.group),
        )
        self.work = CodeWork.make(self.code_plan, plan.size, plan.device)
        self.lists = KeyLists.allocate(plan.rows, 1, plan.max_keys, plan.device)

    @classmethod
    def index_refusal(cls, spec: IndexSpec, method: Method, manifest: Manifest) -> str | None:
        parameters, model = CodeParameters.parse(spec.parameters), manifest.model
        return PRODUCT_CODES.refusal(
            model.query_heads // model.kv_heads,
            model.head_dim,
            manifest.token_count,
            (parameters.subspaces, 2**parameters.bits),
        )

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        arrays = context.index(cls.searched(method).name, layer).arrays()
        return {
            records.CODES: arrays["codes"].data_ptr(),
            records.CODEBOOKS: arrays["codebooks"].data_ptr(),
        }

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        search_codes(q_BHGD, records_BF, self.code_plan, self.work, self.lists)
        return self.lists
