"""The house stays in order: imports run downhill, between packages and between folders, without circles; each
third-party package has its few places; a folder is one idea with a sentence, files are
short, and a name means one thing."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
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

# Folders from the top floor to the ground. A folder may import those behind it, anywhere in a file, and itself.
# A package's own files, errors and configuration, are a floor like any other; `__main__` may import all.
FLOORS = (
    "decode_engine/cli",
    "decode_engine/processes/cluster",
    "decode_engine/evaluation",
    "decode_engine/evaluation/tasks",
    "decode_engine/processes",
    "decode_engine/gateway",
    "decode_engine/gateway/wire",
    "decode_engine/rpc/client",
    "decode_engine/rpc",
    "decode_engine/core",
    "decode_engine/rpc/contexts",
    "decode_engine/rpc/answers",
    "decode_engine/model",
    "decode_engine/steps",
    "decode_engine/steps/attention",
    "decode_engine/engine",
    "decode_engine/engine/sampling",
    "decode_engine/layers",
    "decode_engine/host_search",
    "decode_engine/kernels/slots",
    "decode_engine/kernels/coarse",
    "decode_engine/kernels/clusters",
    "decode_engine/kernels/tables",
    "decode_engine/kernels/attention",
    "decode_engine/kernels",
    "decode_engine/processes/link",
    "decode_engine/rpc/transport",
    "decode_engine/orders",
    "decode_engine/settings",
    "decode_engine",
    "decode_engine/rpc/door",
    "decode_engine/rpc/routing",
    "prefill_worker/cli",
    "prefill_worker/worker",
    "prefill_worker/corpus",
    "prefill_worker/jobs",
    "prefill_worker/build",
    "prefill_worker",
    "prefill_worker/reading",
    "prefill_worker/muse",
    "prefill_worker/muse/kernels",
    "index_store/cli",
    "index_store/memory",
    "index_store/family",
    "index_store/methods",
    "index_store/indexes",
    "index_store/indexes/query_tables",
    "index_store/indexes/key_clusters",
    "index_store/indexes/coarse_rows",
    "index_store/models",
    "index_store/indexes/interface",
    "index_store/jobs",
    "index_store/objects",
    "index_store/store",
    "index_store/store/description",
    "index_store/store/files",
    "index_store/models/fused",
    "index_store/models/conversation",
    "index_store/indexes/kmeans",
    "index_store/selection",
    "index_store/attention",
    "index_store/attention/vectors",
    "index_store/compiled",
    "index_store",
    "sparsekv/v1",
    "sparsekv",
)

MOST_ENTRIES = 15
MOST_LINES = 800

# Names that several folders of one package use for the same part of different things.
ROLES = {
    "index": "the index itself, a LayerIndex",
    "parameters": "what an index is built with",
    "build": "an index's arrays, on the host",
    "build_triton": "the same arrays, on a device",
    "search_numba": "the host's compiled search",
    "products": "the search for many queries at once, as products of matrices",
    "sizes": "what kernels are compiled for, and how their work is cut",
    "search": "the kernels that search",
    "selection": "the kernels that select",
    "reference": "the eager references of the kernels beside it",
    "registry": "all there are, by name",
}

GRPC_PLACES = ("sparsekv/v1/*", "decode_engine/rpc/*", "decode_engine/processes/cluster/*")

COMPILED = (
    "index_store/compiled/loop_cache.py",
    "index_store/compiled/launch.py",
    "index_store/attention/listed_keys_numba.py",
    "index_store/indexes/coarse_rows/best_keys_numba.py",
    "index_store/indexes/coarse_rows/planes_numba.py",
    "decode_engine/host_search/*_numba.py",
    "index_store/attention/vectors/*.py",
)

# Where a third-party package may be imported; a package that is not listed may be imported anywhere.
PLACES = {
    "triton": ("*/kernels/*", "*_triton.py"),
    "numba": (*COMPILED, "decode_engine/core/loading.py"),
    "llvmlite": COMPILED,
    "obstore": ("index_store/objects/bucket.py",),
    "ray": (
        "prefill_worker/corpus/on_ray.py",
        "decode_engine/processes/cluster/application.py",
        "decode_engine/processes/cluster/command.py",
    ),
    "pyarrow": ("prefill_worker/corpus/*",),
    "grpc": GRPC_PLACES,
    "grpc_status": GRPC_PLACES,
    "grpc_health": GRPC_PLACES,
    "grpc_reflection": GRPC_PLACES,
    "zarr": ("index_store/store/writer.py",),
    "faiss": ("index_store/indexes/kmeans/kmeans.py",),
    "transformers": (
        "index_store/models/gguf_*.py",
        "index_store/models/attention_reading.py",
        "index_store/models/loading.py",
        "index_store/models/self_check.py",
        "index_store/models/state_cache.py",
        "index_store/models/tokenizer.py",
        "prefill_worker/reading/capture.py",
        "decode_engine/model/decode_attention.py",
        "decode_engine/model/divided_model.py",
    ),
    "huggingface_hub": ("index_store/models/model_folder.py",),
    "starlette": ("decode_engine/gateway/*", "decode_engine/processes/cluster/http_door.py"),
    "uvicorn": ("decode_engine/gateway/*",),
    "aiohttp": ("decode_engine/processes/cluster/*",),
    "h11": ("decode_engine/gateway/serving.py",),
    "llguidance": ("decode_engine/engine/sampling/*",),
    "zmq": ("decode_engine/processes/link/*", "decode_engine/core/kv_events.py"),
    "opentelemetry": ("index_store/cli/traces.py",),
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
        ("decode_engine/rpc/client/clients.py", "import grpc\nfrom sparsekv.v1 import generation_pb2"),
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


def modules() -> dict[str, str]:
    """Names of all modules, each with its path below the import root."""
    return {
        where.removesuffix(".py").removesuffix("/__init__").replace("/", "."): where
        for where, _ in source_files()
    }


def own_imports(source: str, where: str, known: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Paths of our own modules that a source imports, inside of functions, too, with line numbers."""
    for node in ast.walk(ast.parse(source, where)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in deeper]
        for name in names:
            if name in known and known[name] != where:
                yield known[name], getattr(node, "lineno", 0)


def climbs(source: str, where: str, known: dict[str, str]) -> list[str]:
    """Imports of a folder that is above, or that has no floor."""
    if Path(where).name == "__main__.py":
        return []
    own = str(Path(where).parent)
    found = []
    for target, line in own_imports(source, where, known):
        folder = str(Path(target).parent)
        if folder != own and FLOORS.index(folder) < FLOORS.index(own):
            found.append(f"{where}:{line} imports {target}: {folder} is above {own} (FLOORS in {__file__})")
    return list(dict.fromkeys(found))  # several names of a module are one import


def test_every_folder_has_its_floor() -> None:
    assert sorted(FLOORS) == sorted({str(Path(where).parent) for where, _ in source_files()})


def test_imports_between_folders_run_one_way() -> None:
    known = modules()
    found = [line for where, path in source_files() for line in climbs(path.read_text(), where, known)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from decode_engine.rpc.client import Client", 1),
        ("def f():\n    from decode_engine.rpc import client", 1),
        ("import decode_engine.cli.evaluate_command", 1),
        ("from decode_engine.layers.session import Session\nfrom index_store.errors import StoreError", 0),
    ],
)
def test_a_climb_is_found(source: str, count: int) -> None:
    assert len(climbs(source, "decode_engine/engine/engine.py", modules())) == count


def test_modules_do_not_import_each_other_in_circles() -> None:
    known = modules()
    edges = {
        where: {target for target, _ in own_imports(path.read_text(), where, known)}
        for where, path in source_files()
    }
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_every_folder_is_one_idea_and_says_which() -> None:
    for folder in FLOORS:
        path = ROOT / ("protos" if folder.startswith("sparsekv") else "") / folder
        entries = {
            entry.name
            for entry in path.iterdir()
            if entry.name not in {"__init__.py", "__main__.py", "__pycache__"}
            and not entry.name.startswith(".")
        }
        assert len(entries) <= MOST_ENTRIES, f"{folder} has {len(entries)} entries: {sorted(entries)}"
        assert ast.get_docstring(ast.parse((path / "__init__.py").read_text())), f"{folder} says nothing"


def test_a_name_means_one_thing_in_a_package() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for where, path in source_files():
        if path.stem not in {"__init__", "__main__", *ROLES}:
            places.setdefault((where.split("/")[0], path.stem), []).append(where)
    assert {key: found for key, found in places.items() if len(found) > 1} == {}


def test_tests_mirror_the_folders() -> None:
    """A folder's tests are in the folder of its path, or in rooms there."""
    tests = {
        file.parent.relative_to(ROOT / "tests")
        for package in PACKAGES[1:]
        for file in (ROOT / "tests" / package).rglob("test_*.py")
    }
    known = set(map(Path, FLOORS))
    assert {folder for folder in tests if not {folder, folder.parent} & known} == set()


def test_folders_of_tests_and_ops_are_small() -> None:
    for top in ("tests", "ops"):
        for folder in {ROOT / top, *(path.parent for path in (ROOT / top).rglob("*.py"))}:
            entries = {each.name for each in folder.iterdir()} - {"__init__.py", "__pycache__"}
            assert len(entries) <= MOST_ENTRIES, f"{folder} has {len(entries)} entries: {sorted(entries)}"


def test_files_are_short() -> None:
    """But for stubs, which are generated."""
    tops = ("protos", *PACKAGES[1:], "ops", "tests")
    files = [
        path
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        if "_pb2" not in path.name and path.name != "values.py"
    ]
    files += [path for path in (ROOT / "ops").iterdir() if path.is_file()]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > len(FLOORS)
    found = {where: lines for where, lines in lengths.items() if lines > MOST_LINES}
    assert not found, f"beyond {MOST_LINES} lines, so perhaps two ideas: {found}"
