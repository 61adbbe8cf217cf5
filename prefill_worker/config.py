"""What a prefill job is told: the flags of `prefill-worker run`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from index_store.cli.documents import STANDARD_INPUT
from index_store.cli.options import (
    AUTO,
    MODELS,
    SIZE,
    AtLeast,
    Filled,
    InputFile,
    MoveNameOption,
    ObjectsOption,
    OneOf,
    OutputFile,
    RenewOption,
    StoreBytesOption,
    StoreOption,
    TtlOption,
    check_bounds,
    parse_ttl,
)
from index_store.cli.quotas import QuotasOption
from index_store.cli.storing_checks import storing_checks
from index_store.errors import InvalidArgumentError
from index_store.family.parents import GROWN_SHARE
from index_store.methods.default import DEFAULT_METHOD
from index_store.store.catalog import Store
from index_store.store.description.callers import require_tenant
from index_store.store.description.dtypes import AS_DTYPE, KV_DTYPES, ROW_CODINGS

if TYPE_CHECKING:
    import torch

    from prefill_worker.muse.settings import MuseSettings


_CHUNKS = {"cpu": 2048, "cuda": 8192}
"""Tokens of a pass by default. A GPU waits for Python with shorter ones: 8B, 131,072 tokens, 17.5 s for 11.9."""
_CHUNKS_TOLD = " (default: 2,048 on a CPU, 8,192 on a GPU)"


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What is made of a document, whatever it is.

    method: methods whose indexes the context shall hold, see `methods`. index: further indexes by name, each perhaps
        with build parameters ("key_clusters:window=4096,keys_per_cluster=32").
    dtype: how K and V are stored, "auto" for the checkpoint's dtype. rows: whether in it, or in 8 bits (one of
        `ROW_CODINGS`). chunk: tokens per forward pass.
    attention: "exact", or "muse" for what attends to the past through clusters: clusters, exact blocks and the rest of
        it are the muse_ settings (`prefill_worker.muse.settings`), and a pass carries one block, whatever chunk says.
    query_sample: queries per layer and KV head that indexes are built from (tokens times group).
    device_memory: bytes of the device's memory that the job may use beside the model's weights, None for what is free.

    What takes seconds to import is imported where it is needed: a command line shows its help without it.
    """

    model: Annotated[str, f"{MODELS}.", Filled()]
    store: StoreOption
    method: Annotated[
        tuple[str, ...],
        f"Method whose indexes to build; may be repeated. Default: {DEFAULT_METHOD}, without --index.",
    ] = ()
    index: Annotated[
        tuple[str, ...],
        Option(
            help="Index to build, NAME or NAME:parameter=value,...; may be repeated, and joins those of --method.",
            metavar="NAME",
        ),
    ] = ()
    dense_layers: Annotated[str, "auto, none, or layers such as 0,1."] = AUTO
    dtype: Annotated[str, "Of stored keys and values; auto: the model's.", OneOf(AUTO, *KV_DTYPES)] = AUTO
    rows: Annotated[
        str,
        "How exact keys and values are stored: in that dtype, or in 8 bits (int8), four of which are the "
        "coarse copy of refined.",
        OneOf(*ROW_CODINGS),
    ] = AS_DTYPE
    chunk: Annotated[
        int | None,
        f"Tokens per forward pass{_CHUNKS_TOLD}; with --attention muse, passes are its blocks.",
        AtLeast(1, 2**20),
    ] = None
    state_marks: Annotated[
        int | None,
        Option(
            metavar="TOKENS",
            help="Of a model with states: keep those behind every so many tokens, too, a multiple of --chunk, where "
            "documents that begin alike can go on.",
        ),
        AtLeast(1, 2**30),
    ] = None
    attention: Annotated[
        str,
        "exact, or muse: the past approximated by clusters, for very long contexts.",
        OneOf("exact", "muse"),
    ] = "exact"
    muse_block: Annotated[int, "Tokens of a block that MuSe attends exactly.", AtLeast(1, 2**30)] = 8192
    muse_clusters: Annotated[int, "MuSe's clusters of queries and of keys.", AtLeast(1, 128)] = 64
    muse_cap: Annotated[float, "MuSe's largest cluster, in multiples of the mean one.", AtLeast(1, 64)] = 1.5
    muse_iterations: Annotated[int, "MuSe's iterations of k-means.", AtLeast(1, 100)] = 1
    muse_dipole: Annotated[bool, Option(help="MuSe with dipole terms.")] = True
    query_sample: Annotated[int, "Queries per KV head that indexes are built from.", AtLeast(64, 2**24)] = (
        8192
    )
    ttl: TtlOption = None
    renew: RenewOption = None
    salt: Annotated[str, "Keeps equal documents of different owners apart."] = ""
    tenant: Annotated[str, "Whose context it is: who shows a token of that tenant to a server finds it."] = ""
    seed: Annotated[int, "Of the query sample and the clustering.", AtLeast(0)] = 0
    device: Annotated[
        str, "Where the model runs; auto: a GPU if there is one.", OneOf(AUTO, "cpu", "cuda")
    ] = AUTO
    device_memory: Annotated[
        int | None,
        "Device memory to use beside the model's weights, for example 20GiB; keys and values that do not fit "
        "stay in host memory. auto: what is free once the model is loaded.",
        SIZE,
        AtLeast(1),
    ] = None
    objects: ObjectsOption = None

    def open_store(self) -> Store:
        """The store, made where it is not there, in front of its object store if there is one."""
        from index_store.objects.tier import open_store

        return open_store(self.store, True, self.objects, fetch_timeout_s=None)

    def __post_init__(self) -> None:
        from prefill_worker.muse.settings import MuseSettings

        check_bounds(self)
        require_tenant(self.tenant)
        if len(set(self.method)) != len(self.method):
            raise InvalidArgumentError(
                f"--method is {', '.join(self.method)}, expected one or more different methods"
            )
        given = replace(self._muse_given, seed=0)  # raises for what is out of range
        if self.attention == "exact" and given != MuseSettings():
            raise InvalidArgumentError("--muse-... settings shape --attention muse, which was not asked for")
        if self.device == "cuda":
            from index_store.memory.devices import pick_device

            pick_device(self.device)
        parse_ttl(self.renew)
        if self.ttl is None and self.renew is not None:
            object.__setattr__(self, "ttl", self.renew)
        parse_ttl(self.ttl)
        parse_dense_layers(self.dense_layers)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods whose indexes to build: those given, else the default one; none where only indexes are named."""
        if self.method or self.index:
            return self.method
        return (DEFAULT_METHOD,)

    @property
    def muse(self) -> MuseSettings | None:
        """The settings of approximate attention; None where attention is exact."""
        return self._muse_given if self.attention == "muse" else None

    @property
    def _muse_given(self) -> MuseSettings:
        from prefill_worker.muse.settings import MuseSettings

        return MuseSettings(
            clusters=self.muse_clusters,
            cap=self.muse_cap,
            iterations=self.muse_iterations,
            block=self.muse_block,
            dipole=self.muse_dipole,
            seed=self.seed,
        )

    @property
    def pass_tokens(self) -> int:
        """Tokens per forward pass."""
        return self.muse_block if self.attention == "muse" else self.prompt_tokens

    @property
    def prompt_tokens(self) -> int:
        """The same of a calibration prompt."""
        return self.chunk or _CHUNKS[self.torch_device.type]

    @property
    def torch_device(self) -> torch.device:
        """Where the model runs."""
        from index_store.memory.devices import pick_device

        return pick_device(self.device)


@dataclass(frozen=True, slots=True)
class PrefillConfig(JobConfig):
    """One job. `input` are text files in order, or `messages` is a file with a conversation; `-` is standard input."""

    input: Annotated[
        tuple[Path, ...], "Text file; may be repeated; - is standard input.", InputFile(dash=True)
    ] = ()
    messages: Annotated[
        Path | None,
        Option(
            metavar="FILE.json",
            help="In place of text: messages of a conversation, for the model's chat template; - is standard input.",
        ),
        InputFile(dash=True),
    ] = None
    name: Annotated[str | None, "Display name; by default the first file's name."] = None
    move_name: MoveNameOption = False
    calibration: Annotated[Path | None, "Example prompts: one question per line, or .jsonl.", InputFile()] = (
        None
    )

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)
        if self.input and self.messages is not None:
            raise InvalidArgumentError("--input and --messages are given, expected one of them")
        if not self.input and self.messages is None:
            raise InvalidArgumentError(
                "no input: pass --input FILE, or --input - for standard input, or --messages with a conversation"
            )
        if self.move_name and self.name is None:
            raise InvalidArgumentError("--move-name goes with --name, which says what moves")
        if self.name is not None and not (self.name.isprintable() and 0 < len(self.name) <= 500):
            raise InvalidArgumentError(
                f"--name is {self.name[:80]!r}, expected 1 to 500 printable characters"
            )


@dataclass(frozen=True, slots=True)
class CorpusConfig(JobConfig):
    """Many documents, and how each is to be made.

    sources: files, folders, URLs of object stores. workers: processes that read, each with the model in memory.
    retries: of a document that failed, by an error that may pass or with its worker.
    """

    sources: Annotated[
        tuple[str, ...],
        Argument(
            metavar="SOURCE",
            help="Files and folders of text, JSON lines and Parquet, or s3://, gs://, az://.",
        ),
        Filled(),
    ] = ()
    text_field: Annotated[str, "Member or column with the text.", Filled()] = "text"
    name_field: Annotated[str, "Member or column with the context's name.", Filled()] = "name"
    workers: Annotated[
        int,
        "Processes that read, each with the model, and with a GPU or its share of the cores.",
        AtLeast(1, 10_000),
    ] = 1
    retries: Annotated[int, "Of a document that failed.", AtLeast(0, 100)] = 2
    failures: Annotated[
        Path | None, Option(metavar="FILE.jsonl", help="Where to list documents that failed."), OutputFile()
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            metavar="ADDRESS", help="A running Ray cluster; by default one of this machine alone is started."
        ),
    ] = None

    def __post_init__(self) -> None:
        JobConfig.__post_init__(self)
        if not self.sources:
            raise InvalidArgumentError("SOURCE is missing: name files, folders or URLs of documents")

    def job(self) -> PrefillConfig:
        """What is told of each of the jobs; its input comes otherwise."""
        shared = {field.name: getattr(self, field.name) for field in fields(JobConfig)}
        return PrefillConfig(**shared, input=(STANDARD_INPUT,))


@dataclass(frozen=True, slots=True)
class DetachConfig:
    """A child to be made whole. context: its id, the first digits of it, or its name."""

    context: Annotated[str, "Name or id of a stored context that continues another.", Filled()]
    store: StoreOption
    device: Annotated[str, "auto, cpu or cuda.", OneOf(AUTO, "cpu", "cuda")] = AUTO

    def __post_init__(self) -> None:
        _ = self.torch_device  # refuses a GPU that is not there

    @property
    def torch_device(self) -> torch.device:
        """Where indexes are built."""
        from index_store.memory.devices import pick_device

        return pick_device(self.device)


@dataclass(frozen=True, slots=True)
class AddIndexConfig(DetachConfig):
    """Indexes to add to a stored context. method, index: as for a job that prefills."""

    context: Annotated[str, "Name or id of a stored context.", Filled()]
    method: Annotated[tuple[str, ...], "Method whose indexes to add; may be repeated."] = ()
    index: Annotated[
        tuple[str, ...],
        Option(help="Index to add, NAME or NAME:parameter=value,...; may be repeated.", metavar="NAME"),
    ] = ()

    def __post_init__(self) -> None:
        if not (self.method or self.index):
            raise InvalidArgumentError("nothing to add: give --method or --index")
        DetachConfig.__post_init__(self)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker of a store's queue. chunk, device, device_memory: as for a job that prefills.

    grown_share: of a child's tokens to its parent's, from which on it is made whole (index_store/family/parents.py).
    attached: ends with standard input, for programs that start workers and may be killed.
    """

    store: StoreOption
    model: Annotated[str, f"{MODELS}.", Filled()]
    chunk: Annotated[
        int | None,
        f"Tokens per forward pass{_CHUNKS_TOLD}; after each, progress is told, and a job may be stopped.",
        AtLeast(1, 2**20),
    ] = None
    device: Annotated[
        str, "Where the model runs; auto: a GPU if there is one.", OneOf(AUTO, "cpu", "cuda")
    ] = AUTO
    device_memory: Annotated[
        int | None,
        "Device memory to use beside the model's weights, for example 20GiB; auto: what is free.",
        SIZE,
        AtLeast(1),
    ] = None
    grown_share: Annotated[
        float,
        "Share of a context's tokens from which on what continues it is made to stand alone, with indexes of "
        "its own (4,096 tokens at least); 0: never.",
        AtLeast(0, 1000),
    ] = GROWN_SHARE
    store_bytes: StoreBytesOption = None
    objects: ObjectsOption = None
    quotas: QuotasOption = None
    attached: Annotated[bool, "End when standard input ends, for programs that start workers."] = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.device == "cuda":
            from index_store.memory.devices import pick_device

            pick_device(self.device)

    def checks(self) -> Iterator[Callable[[], object]]:
        """What can be looked at before a model is loaded; each raises a SparseKVError."""
        yield from storing_checks(self.store, self.objects, self.quotas, create=False)


def parse_dense_layers(text: str) -> tuple[int, ...] | None:
    """Layer numbers, ascending, or None for "auto". Raises InvalidArgumentError for anything else."""
    if text == "auto":
        return None
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,4}", part.strip()) for part in parts):
        raise InvalidArgumentError(
            f"--dense-layers is {text!r}, expected auto, none or layer numbers such as 0,1"
        )
    return tuple(sorted({int(part) for part in parts}))
