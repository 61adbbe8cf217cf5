"""Which compiled loops decode steps run on a host, by the method's name: what `compile_beside` compiles beforehand.

Names alone, so that processes that compile start before anything that is slow to import. A loop that is missing here
is compiled when it is first called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

_ATTENTION = "index_store.attention"
_TABLES = "index_store.indexes.query_tables"
_SCALARS = "index_store.indexes.coarse_rows.scalars"
_SELECTION = "index_store.selection"

_ATTEND = f"{_ATTENTION}.listed_keys_numba:_attend"
_POOL = f"{_ATTENTION}.pooled_weights_numba:_pooled_weights"
_LEAVE_OUT = f"{_SELECTION}.remainders_numba:_leave_out"
_TOP_K = f"{_SELECTION}.top_k_numba:_top_k_rows"
_COLLECT = f"{_SELECTION}.collect_numba:_collect_rows"
_KEEP_INSIDE = f"{_SELECTION}.searchable_numba:_keep_inside"
_CLUSTER_SUMS = f"{_SELECTION}.remainders_numba:_cluster_sums"
_TABLE_SUMS = f"{_TABLES}.search_numba:_softmax_sum_rows"
_SCORE_LISTS, _INSERT_KEYS = f"{_TABLES}.lists_numba:_score_lists", f"{_TABLES}.lists_numba:_insert_keys"
_SEARCH_TREE = "index_store.indexes.key_clusters.tree_numba:_search_tree"
_SCORE_CODES = "index_store.indexes.product_codes.search_numba:_score_codes"

CODE_ROWS = (f"{_SCALARS}.coding_numba:_write_codes", f"{_SCALARS}.coding_numba:_find_ranges")
"""What makes a coarse copy: of a context that is read, and of keys that a session appends."""

_COARSE_STEP = (
    f"{_SCALARS}.value_sums_numba:_attend_parts",
    f"{_SCALARS}.best_keys_numba:_take_best",
    f"{_SCALARS}.key_scores_numba:_score_keys",
    f"{_SCALARS}.negligible_runs_numba:find_limits",
    f"{_SCALARS}.value_sums_numba:_merge_parts",
    *CODE_ROWS,
)
_COARSE = (*_COARSE_STEP, _POOL, f"{_SCALARS}.key_scores_numba:_weigh", _TOP_K, _LEAVE_OUT)
"""Several positions of a prompt ask for more than a step does."""

_OF_METHODS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "full": (),
        "exact": _COARSE_STEP,
        "oracle": (_POOL, _TOP_K),
        "csattention": (_TABLE_SUMS, _TOP_K, _CLUSTER_SUMS),
        "csattention-paper": (_SCORE_LISTS, _TOP_K, _INSERT_KEYS),
        "squeezed": (_COLLECT,),
        "squeezed-tree": (_COLLECT, _SEARCH_TREE),
        "multipole": (_COLLECT, _CLUSTER_SUMS),
        "multipole-windowed": (_COLLECT, _CLUSTER_SUMS),
        "multipole-tree": (_COLLECT, _CLUSTER_SUMS, _SEARCH_TREE),
        "tactic": (_COLLECT, _KEEP_INSIDE),
        "quest": (_COLLECT,),
        "pq": (_POOL, _SCORE_CODES, _TOP_K, _CLUSTER_SUMS),
        "refined": _COARSE,
        "refined-3": _COARSE,
    }
)


def loops_of(methods: Sequence[str]) -> list[str]:
    """`module:function` of what decode steps of these methods and of full attention run on a host, each once.

    Of a method with options (`oracle+centred`, `pq@sinks=16`): that of its preset.
    """
    presets = [name.partition("+")[0].partition("@")[0] for name in methods]
    found = [_ATTEND, *(loop for name in presets for loop in _OF_METHODS.get(name, ()))]
    return list(dict.fromkeys(found))
