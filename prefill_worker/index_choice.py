"""Which indexes a job builds: those of its methods, as the command line's flags reshape them."""

from __future__ import annotations

from index_store.errors import InvalidArgumentError
from index_store.indexes.base import Scalar
from index_store.methods import METHODS, IndexSpec, Method, get_method, index_spec
from prefill_worker.config import PrefillConfig

FIXED_METHODS = frozenset({"csattention-paper"})
"""Methods whose name promises one index: the one that was published."""


def index_specs(config: PrefillConfig) -> list[IndexSpec]:
    """The different indexes that the methods need stored; methods may share one.

    --tables, --subspaces, --centroids and --split reshape the indexes of all methods given but the fixed ones. Raises
    MethodUnsupportedError for an unknown method, InvalidArgumentError for parameters that no index can take.
    """
    overrides: dict[str, Scalar] = {
        name: value
        for name, value in (
            ("layout", config.tables),
            ("subspaces", config.subspaces),
            ("centroids", config.centroids),
            ("split", config.split),
        )
        if value is not None
    }
    methods = [get_method(name) for name in config.method]
    if overrides and not any(_reshapable(method) for method in methods):
        _refuse(methods)
    specs: dict[str, IndexSpec] = {}
    for method in methods:
        spec = index_spec(method, **(overrides if _reshapable(method) else {}))
        if spec is not None:
            specs[spec.name] = spec
    return list(specs.values())


def check_centroids(config: PrefillConfig, queries: int) -> None:
    """Raises InvalidArgumentError when --centroids asks for more than there are sampled queries per KV head.

    Every further centroid would repeat another one, at the price of a table row of the context's length. A method's
    own number is always taken, so that short documents need no flags.
    """
    for name in config.method:
        method = get_method(name)
        wanted = config.centroids
        if wanted is None or wanted <= queries or not _reshapable(method) or method.index is None:
            continue
        if wanted != method.index.parameters.get("centroids"):
            raise InvalidArgumentError(
                f"--centroids is {wanted}, expected at most {queries}: that many queries are sampled per KV head of "
                "this document; give fewer centroids, a longer document or a larger --query-sample",
                centroids=wanted,
                queries=queries,
            )


def _reshapable(method: Method) -> bool:
    return method.name not in FIXED_METHODS and index_spec(method) is not None


def _refuse(methods: list[Method]) -> None:
    names = ", ".join(method.name for method in methods)
    flags = "--tables, --subspaces, --centroids and --split"
    if any(method.name in FIXED_METHODS for method in methods):
        others = ", ".join(method.name for method in METHODS.values() if _reshapable(method))
        raise InvalidArgumentError(
            f"{flags} shape an index, but the index of csattention-paper is fixed by the paper (methods given: "
            f"{names}); leave the flags out, or use --method {others} for variants"
        )
    raise InvalidArgumentError(f"{flags} shape an index, but method {names} stores none")
