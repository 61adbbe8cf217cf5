"""The layers stay apart: imports run downhill, and each third-party package has its few places."""

from __future__ import annotations

import ast
import fnmatch
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sparsekv", "index_store", "prefill_worker", "decode_engine")

# Which of our packages each package may import, besides itself.
MAY_IMPORT = {
    "sparsekv": set(),
    "index_store": {"sparsekv"},
    "prefill_worker": {"sparsekv", "index_store"},
    "decode_engine": {"sparsekv", "index_store"},
}

GRPC_PLACES = ("sparsekv/v1/*", "decode_engine/rpc/*", "decode_engine/rpc/client.py")

# Where a third-party package may be imported; a package that is not listed may be imported anywhere.
PLACES = {
    "triton": ("*/kernels/*",),
    "grpc": GRPC_PLACES,
    "grpc_status": GRPC_PLACES,
    "grpc_health": GRPC_PLACES,
    "grpc_reflection": GRPC_PLACES,
    "zarr": ("index_store/store/zarr_io.py",),
    "faiss": ("index_store/kmeans/kmeans.py",),
    "transformers": (
        "index_store/models/loading.py",
        "index_store/models/tokenizer.py",
        "prefill_worker/reading/capture.py",
        "decode_engine/model/decode_attention.py",
    ),
    "pickle": (),
    "shelve": (),
    "dill": (),
    "cloudpickle": (),
}

DYNAMIC_IMPORTS = {"importlib.import_module", "__import__"}


def source_files() -> Iterator[tuple[str, Path]]:
    """Every module of the project, as (path below the import root, file)."""
    for package in PACKAGES:
        base = ROOT / "protos" if package == "sparsekv" else ROOT
        for path in sorted((base / package).rglob("*.py")):
            yield path.relative_to(base).as_posix(), path


def imported_modules(source: str, where: str) -> Iterator[tuple[str, int]]:
    """Absolute names of all modules that a source imports, anywhere in it, with their line numbers."""
    package = Path(where).parent.parts
    for node in ast.walk(ast.parse(source, where)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield ".".join(part for part in (base, node.module) if part), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC_IMPORTS and node.args:
            yield str(ast.literal_eval(node.args[0])), node.lineno


def violations(source: str, where: str) -> list[str]:
    own = Path(where).parts[0]
    found = []
    for module, line in imported_modules(source, where):
        top = module.split(".")[0]
        if top in PACKAGES and top != own and top not in MAY_IMPORT[own]:
            found.append(f"{where}:{line} imports {module}: {own} must not know {top}")
        if top in PLACES and not any(fnmatch.fnmatch(where, place) for place in PLACES[top]):
            found.append(f"{where}:{line} imports {module}: only {', '.join(PLACES[top]) or 'no file'} may")
        if top in {"tests", "ops"}:
            found.append(f"{where}:{line} imports {module}, which is not part of the product")
    return found


def test_imports_run_downhill_and_stay_in_their_places() -> None:
    files = list(source_files())
    assert {where.split("/")[0] for where, _ in files} == set(PACKAGES)
    found = [line for where, path in files for line in violations(path.read_text(), where)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("index_store/a.py", "import decode_engine.layers.session"),
        ("prefill_worker/a.py", "def f():\n    from decode_engine import client"),
        ("decode_engine/evaluation/a.py", "import prefill_worker"),
        ("decode_engine/engine/engine.py", "import grpc"),
        ("decode_engine/layers/session.py", "import triton.language as tl"),
        ("index_store/store/catalog.py", "from zarr.storage import LocalStore"),
        ("index_store/store/catalog.py", "import importlib\nimportlib.import_module('faiss')"),
        ("prefill_worker/jobs/job.py", "import pickle"),
        ("sparsekv/v1/a.py", "import index_store"),
    ],
)
def test_a_violation_is_found(where: str, source: str) -> None:
    assert len(violations(source, where)) == 1


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("decode_engine/kernels/gather.py", "import triton"),
        ("decode_engine/rpc/client.py", "import grpc\nfrom sparsekv.v1 import generation_pb2"),
        ("prefill_worker/jobs/job.py", "from index_store.store.catalog import Store\nfrom . import build"),
        ("index_store/indexes/a.py", "from ..errors import StoreError"),
    ],
)
def test_a_lawful_import_passes(where: str, source: str) -> None:
    assert violations(source, where) == []


def test_relative_imports_resolve() -> None:
    names = [
        name
        for name, _ in imported_modules("from .. import x\nfrom .b import y", "decode_engine/evaluation/a.py")
    ]
    assert names == ["decode_engine", "decode_engine.evaluation.b"]


def test_modules_do_not_import_each_other_in_circles() -> None:
    files = {
        where.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for where, path in source_files()
    }
    edges = {
        name: {target for target, _ in top_level_imports(path, name) if target in files and target != name}
        for name, path in files.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def top_level_imports(path: Path, name: str) -> Iterator[tuple[str, int]]:
    """Modules that a file imports while it is being imported itself (not inside functions)."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in PACKAGES[1:]
        for file in (ROOT / top).rglob("__init__.py")
    }
    assert set(listed) - {"sparsekv", "sparsekv.v1"} == found
