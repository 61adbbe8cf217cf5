"""Every kernel that is launched has an eager reference, and every reference is compared by a test.

A launch function `f`, which holds `some_kernel[grid](...)`, has the reference `f_reference` in its folder, or stands in
`COMPARED_WITH` beside the one that covers it. A reference counts as compared when a test names it, or names something
that is made of it: another function, or a table of functions. A launch counts as run likewise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("index_store", "prefill_worker", "decode_engine")

Place = tuple[str, str]
"""A module and a name in it."""

LAUNCH: Place = ("index_store.compiled.launch", "launch")
"""Starts loops that numba compiled."""

_CLUSTERS = ("decode_engine.kernels.clusters.reference", "remainder_reference")
_TABLES = ("decode_engine.kernels.tables.reference", "table_attention_reference")
COMPARED_WITH: Mapping[Place, Place | str] = {
    (
        "decode_engine.host_search.mailbox_triton",
        "await_lists",
    ): "lists are those that the test's host answers",
    (
        "decode_engine.host_search.mailbox_triton",
        "post_queries",
    ): "queries are those that the test asked with",
    ("decode_engine.kernels.attention.shared_attention", "attend_shared"): (
        "decode_engine.kernels.attention.shared_attention",
        "attend_dense_reference",
    ),
    ("decode_engine.kernels.attention.shared_attention", "attend_window"): (
        "decode_engine.kernels.attention.shared_attention",
        "attend_dense_reference",
    ),
    ("decode_engine.kernels.clusters.lookup", "look_up"): _CLUSTERS,
    ("decode_engine.kernels.clusters.lookup", "correct_clusters"): _CLUSTERS,
    ("index_store.indexes.coarse_rows.coded_steps_numba", "_launch"): (
        "index_store.indexes.coarse_rows.reference",
        "attend_values_reference",
    ),
    (
        "decode_engine.model.row_layers",
        "RowLayers",
    ): "the model's own forward, by a trial at every start, too",
    ("decode_engine.kernels.slots.slot_cache", "copy_rows"): "rows are those that the test copied from",
    ("decode_engine.kernels.slots.slot_fetch", "fetch_rows"): "a cache of dictionaries in slot_problems.py",
    ("decode_engine.kernels.tables.search", "pick"): _TABLES,
    ("decode_engine.kernels.tables.search", "search"): _TABLES,
    ("decode_engine.kernels.tables.selection", "select"): _TABLES,
    ("decode_engine.kernels.tables.selection", "attend"): _TABLES,
}


class Sources:
    """Python sources by module: what is defined at their top, and which definitions each of these names."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._trees = {module: ast.parse(text) for module, text in texts.items()}
        self._imported: dict[ast.Module, dict[str, Place]] = {}
        self._definitions = {
            (module, name): node
            for module, tree in self._trees.items()
            for node in tree.body
            for name in _defined(node)
        }

    def references(self) -> set[Place]:
        return {place for place in self._definitions if place[1].endswith("_reference")}

    def launches(self) -> set[Place]:
        """Functions that hold `kernel[grid](...)` with a Triton kernel, or `launch(loop, ...)` with a compiled loop."""
        compiled = {place for place, node in self._definitions.items() if _is_compiled(node)}
        found = set()
        for module, tree in self._trees.items():
            imports = self._imports(tree)
            own = {name for place, name in compiled if place == module}
            kernels = own | {name for name, place in imports.items() if place in compiled}
            loops = imports.get("launch") == LAUNCH
            found |= {
                (module, name)
                for node in tree.body
                for name in _defined(node)
                if (module, name) not in compiled
                and any(_is_launch(part, kernels, loops) for part in ast.walk(node))
            }
        return found

    def named_in(self, tests: Mapping[str, str]) -> set[Place]:
        """Definitions that tests name, and those that these are made of.

        What launches a kernel ends the chain: loops run their reference where they cannot read a tensor.
        """
        launches = self.launches()
        trees = [ast.parse(text) for text in tests.values()]
        left = [place for tree in trees for place in self._used(tree, tree, "")]
        found: set[Place] = set()
        while left:
            place = left.pop()
            if place in self._definitions and place not in found:
                found.add(place)
                if place in launches:
                    continue
                left += self._used(self._definitions[place], self._trees[place[0]], place[0])
        return found

    def _used(self, node: ast.AST, tree: ast.Module, module: str) -> Iterator[Place]:
        """What a part of a module names: its own definitions, imported ones, and those of imported modules."""
        imports = self._imports(tree)
        yield from (imports.get(name, (module, name)) for name in _names_in(node))
        for part in ast.walk(node):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.value, ast.Name)
                and part.value.id in imports
            ):
                yield ".".join(imports[part.value.id]), part.attr

    def _imports(self, tree: ast.Module) -> dict[str, Place]:
        if tree not in self._imported:
            self._imported[tree] = {
                alias.asname or alias.name: (node.module, alias.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module is not None
                for alias in node.names
            }
        return self._imported[tree]


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _names_in(node: ast.AST) -> set[str]:
    return {
        name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    }


def _is_compiled(node: ast.stmt) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any("triton.jit" in ast.unparse(decorator) for decorator in decorators)


def _is_launch(node: ast.AST, kernels: set[str], loops: bool) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return loops and node.func.id == "launch"
    # Also where the grid comes first: `at_once = kernel[grid]`.
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in kernels


def complaints(
    product: Mapping[str, str], tests: Mapping[str, str], compared_with: Mapping[Place, Place | str]
) -> list[str]:
    """What breaks the rule, a sentence each; sources by module."""
    sources = Sources(product)
    references, launches = sources.references(), sources.launches()
    named = sources.named_in(tests)
    found = [f"no test compares {name} of {module}" for module, name in sorted(references - named)]
    found += [f"no test runs {name} of {module}" for module, name in sorted(launches - named)]
    by_folder = {(module.rpartition(".")[0], name) for module, name in references}
    for module, name in sorted(launches):
        own = (module.rpartition(".")[0], f"{name.lstrip('_')}_reference") in by_folder
        if own and (module, name) in compared_with:
            found.append(f"{name} of {module} has a reference of its own and needs no other")
        if not own and (module, name) not in compared_with:
            found.append(f"{name} of {module} launches a kernel and has no reference")
    for place, other in sorted(compared_with.items()):
        if place not in launches:
            found.append(f"{place[1]} of {place[0]} launches nothing")
        if isinstance(other, tuple) and other not in references:
            found.append(f"there is no reference {other[1]} in {other[0]}")
    return found


def _texts(*folders: str) -> dict[str, str]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_kernels_have_references_that_tests_compare() -> None:
    assert complaints(_texts(*PACKAGES), _texts("tests"), COMPARED_WITH) == []


PRODUCT = {
    "a.b": "@triton.jit\ndef sum_kernel(): ...\ndef add_reference(): ...\ndef add(x):\n    sum_kernel[(1,)](x)\n"
    "ALL = [add_reference]",
    "a.c": "from a.b import sum_kernel as of_all\ndef multiply(x):\n    at_once = of_all[(1,)]\n    at_once(x)",
    "a.d": "from a.b import add, add_reference\ndef twice():\n    add_reference()",
    "a.e": "from index_store.compiled.launch import launch\ndef count_reference(): ...\n"
    "def count(x):\n    launch(_loop, x)\n    count_reference()",
}
RUN = "from a import c, e\nc.multiply(1)\ne.count(1)\nfrom a.e import count_reference\ncount_reference()\n"
ADD = "from a.b import add\nadd(1)\n"
OTHER: dict[Place, Place | str] = {("a.c", "multiply"): ("a.b", "add_reference")}


@pytest.mark.parametrize(
    "test",
    [
        "from a.b import add_reference\nadd_reference()",
        "from a.b import ALL as every\nevery[0]()",
        "from a.d import twice\ntwice()",
        "from a import b\nb.add_reference()",
    ],
)
def test_references_are_named_directly_or_through_what_is_made_of_them(test: str) -> None:
    assert complaints(PRODUCT, {"t": RUN + ADD + test}, OTHER) == []


@pytest.mark.parametrize("test", ["", "from a.b import add_reference", "add_reference()"])
def test_a_reference_that_no_test_names_is_found(test: str) -> None:
    assert complaints(PRODUCT, {"t": RUN + ADD + test}, OTHER) == ["no test compares add_reference of a.b"]


def test_a_kernel_that_no_test_runs_is_found() -> None:
    named = "from a.b import add_reference\nadd_reference()"
    assert complaints(PRODUCT, {"t": RUN + named}, OTHER) == ["no test runs add of a.b"]


def test_a_loop_does_not_stand_for_its_reference() -> None:
    named = "from a.d import twice\ntwice()\n" + ADD
    run = RUN.replace("from a.e import count_reference\ncount_reference()\n", "")
    assert complaints(PRODUCT, {"t": run + named}, OTHER) == ["no test compares count_reference of a.e"]


def test_a_kernel_without_a_reference_is_found() -> None:
    named = "from a.d import twice\ntwice()\n" + ADD
    assert complaints(PRODUCT, {"t": RUN + named}, {}) == [
        "multiply of a.c launches a kernel and has no reference"
    ]
    without = {**PRODUCT, "a.e": PRODUCT["a.e"].replace("count_reference", "counted")}
    assert complaints(without, {"t": RUN + named}, OTHER) == [
        "count of a.e launches a kernel and has no reference"
    ]


def test_stale_exceptions_are_found() -> None:
    stale: dict[Place, Place | str] = {
        ("a.d", "twice"): "gone",
        ("a.b", "add"): ("a.b", "gone_reference"),
        **OTHER,
    }
    assert complaints(PRODUCT, {"t": RUN + ADD + "from a.d import twice\ntwice()"}, stale) == [
        "add of a.b has a reference of its own and needs no other",
        "there is no reference gone_reference in a.b",
        "twice of a.d launches nothing",
    ]
