"""Every kernel that is launched has an eager reference, and every reference is compared by a test.

A launch function `f`, which holds `some_kernel[grid](...)`, has the reference `f_reference` in its folder, or stands in
`COMPARED_WITH` beside the one that covers it. A reference counts as compared when a test names it, or names something
that is made of it: another function, or a table of functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("index_store", "prefill_worker", "decode_engine")

Place = tuple[str, str]
"""A module and a name in it."""

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
    ("decode_engine.host_search.turns_triton", "Lane"): "nothing is computed",
    ("decode_engine.kernels.attention.sparse_attention", "attend_lists"): (
        _CLUSTERS[0],
        "attend_lists_reference",
    ),
    ("decode_engine.kernels.clusters.lookup", "look_up"): _CLUSTERS,
    ("decode_engine.kernels.clusters.remainder", "correct_clusters"): _CLUSTERS,
    ("decode_engine.kernels.slots.gather_rows", "copy_rows"): "rows are those that the test copied from",
    ("decode_engine.kernels.slots.slot_fetch", "fetch_rows"): "a cache of dictionaries in slot_problems.py",
    ("decode_engine.kernels.tables.search", "pick"): _TABLES,
    ("decode_engine.kernels.tables.search", "search"): _TABLES,
    ("decode_engine.kernels.tables.selection", "select"): _TABLES,
    ("decode_engine.kernels.tables.table_attention", "attend"): _TABLES,
}


class Sources:
    """Python sources by module: what is defined at their top, and which definitions each of these names."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._trees = {module: ast.parse(text) for module, text in texts.items()}
        self._definitions = {
            (module, name): node
            for module, tree in self._trees.items()
            for node in tree.body
            for name in _defined(node)
        }

    def references(self) -> set[Place]:
        return {place for place in self._definitions if place[1].endswith("_reference")}

    def launches(self) -> set[Place]:
        """Functions that hold `some_kernel[grid](...)`."""
        return {place for place, node in self._definitions.items() if any(map(_is_launch, ast.walk(node)))}

    def named_in(self, tests: Mapping[str, str]) -> set[Place]:
        """Definitions that tests name, and those that these are made of."""
        left = [place for text in tests.values() for place in self._names(ast.parse(text), "")]
        found: set[Place] = set()
        while left:
            place = left.pop()
            if place in self._definitions and place not in found:
                found.add(place)
                imports = self._imports(self._trees[place[0]], place[0])
                names = _names_in(self._definitions[place])
                left += [imports.get(name, (place[0], name)) for name in names]
        return found

    def _names(self, tree: ast.Module, module: str) -> Iterator[Place]:
        """What a test imports by name and then uses."""
        used = _names_in(tree)
        return (place for name, place in self._imports(tree, module).items() if name in used)

    def _imports(self, tree: ast.Module, module: str) -> dict[str, Place]:
        found = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    found[alias.asname or alias.name] = (node.module, alias.name)
        return found


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


def _is_launch(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id.endswith("_kernel")


def complaints(
    product: Mapping[str, str], tests: Mapping[str, str], compared_with: Mapping[Place, Place | str]
) -> list[str]:
    """What breaks the rule, a sentence each; sources by module."""
    sources = Sources(product)
    references, launches = sources.references(), sources.launches()
    named = sources.named_in(tests)
    found = [f"no test compares {name} of {module}" for module, name in sorted(references - named)]
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


def test_the_rule_can_be_broken() -> None:
    product = {
        "a.b": "def add_reference(): ...\ndef add(x):\n    add_kernel[(1,)](x)\nALL = [add_reference]",
        "a.c": "def multiply(x):\n    product_kernel[(1,)](x)",
        "a.d": "from a.b import add_reference\ndef twice(): add_reference()",
    }
    naming = ("from a.b import add_reference\nadd_reference()", "from a.b import ALL as every\nevery[0]()")
    via_other = ("from a.d import twice\ntwice()",)
    other: dict[Place, Place | str] = {("a.c", "multiply"): ("a.b", "add_reference")}
    for test in (*naming, *via_other):
        assert complaints(product, {"t": test}, other) == []
    assert complaints(product, {"t": naming[0]}, {}) == [
        "multiply of a.c launches a kernel and has no reference"
    ]
    for test in ("", "from a.b import add_reference", "from a.b import add\nadd(1)", "add_reference()"):
        assert complaints(product, {"t": test}, other) == ["no test compares add_reference of a.b"]
    stale: dict[Place, Place | str] = {
        ("a.d", "twice"): "gone",
        ("a.b", "add"): ("a.b", "gone_reference"),
        **other,
    }
    assert complaints(product, {"t": naming[0]}, stale) == [
        "add of a.b has a reference of its own and needs no other",
        "there is no reference gone_reference in a.b",
        "twice of a.d launches nothing",
    ]
