"""What a prefill job is told: the flags of `prefill-worker run`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from index_store.cli.checks import AtLeast, Filled, InputFile, OneOf
from index_store.cli.options import AUTO, SIZE, StoreOption, check_bounds
from index_store.errors import InvalidArgumentError
from index_store.store.dtypes import KV_DTYPES

if TYPE_CHECKING:
    import torch

    from prefill_worker.muse.settings import MuseSettings

_TTL = re.compile(r"0+|([0-9]+(?:\.[0-9]+)?)([smhd])")
_TTL_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_TTL = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """One job. `input` are files in order, `-` is standard input.

    method: methods whose indexes the context shall hold, see `methods`. index: further indexes by name, each perhaps
        with build parameters ("key_clusters:window=4096,keys_per_cluster=32"). tables, subspaces, centroids, split:
        build parameters of query tables, None for the index's own.
    dtype: how K and V are stored, "auto" for the checkpoint's dtype. chunk: tokens per forward pass.
    attention: "exact", or "muse" for what attends to the past through clusters: clusters, exact blocks and the rest of
        it are the muse_ settings (`prefill_worker.muse.settings`), and a pass carries one block, whatever chunk says.
    query_sample: queries per layer and KV head that indexes are built from (tokens times group).
    device_memory: bytes of the device's memory that the job may use beside the model's weights, None for what is free.

    What takes seconds to import is imported where it is needed: a command line shows its help without it.
    """

    model: Annotated[str, Option(help="'reader', or the path of a Hugging Face model folder."), Filled()]
    input: Annotated[
        tuple[Path, ...],
        Option(help="Text file; may be repeated; - is standard input."),
        InputFile(dash=True),
    ]
    store: StoreOption
    name: Annotated[str | None, Option(help="Display name; by default the first file's name.")] = None
    method: Annotated[
        tuple[str, ...],
        Option(help="Method whose indexes to build; may be repeated. Default: csattention, without --index."),
    ] = ()
    index: Annotated[
        tuple[str, ...],
        Option(
            help="Index to build, NAME or NAME:parameter=value,...; may be repeated, and joins those of --method.",
            metavar="NAME",
        ),
    ] = ()
    tables: Annotated[
        str | None,
        Option(help="Layout of query tables; default: the index's own."),
        OneOf("dense", "lists"),
    ] = None
    subspaces: Annotated[
        int | None,
        Option(help="Slices of query tables; default: the index's own."),
        AtLeast(1, 4096),
    ] = None
    centroids: Annotated[
        int | None,
        Option(help="Centroids of query tables; default: the index's own."),
        AtLeast(1, 65_536),
    ] = None
    split: Annotated[
        str | None,
        Option(help="How slices are formed; default: the index's own."),
        OneOf("strided", "contiguous"),
    ] = None
    calibration: Annotated[
        Path | None, Option(help="Example prompts: one question per line, or .jsonl."), InputFile()
    ] = None
    dense_layers: Annotated[str, Option(help="auto, none, or layers such as 0,1.")] = AUTO
    dtype: Annotated[
        str, Option(help="Of stored keys and values; auto: the model's."), OneOf(AUTO, *KV_DTYPES)
    ] = AUTO
    chunk: Annotated[
        int,
        Option(help="Tokens per forward pass; with --attention muse, passes are its blocks."),
        AtLeast(1, 2**20),
    ] = 2048
    attention: Annotated[
        str,
        Option(help="exact, or muse: the past approximated by clusters, for very long contexts."),
        OneOf("exact", "muse"),
    ] = "exact"
    muse_block: Annotated[
        int, Option(help="Tokens of a block that MuSe attends exactly."), AtLeast(1, 2**30)
    ] = 8192
    muse_clusters: Annotated[int, Option(help="MuSe's clusters of queries and of keys."), AtLeast(1, 128)] = (
        64
    )
    muse_cap: Annotated[
        float, Option(help="MuSe's largest cluster, in multiples of the mean one."), AtLeast(1, 64)
    ] = 1.5
    muse_iterations: Annotated[int, Option(help="MuSe's iterations of k-means."), AtLeast(1, 100)] = 1
    muse_dipole: Annotated[bool, Option(help="MuSe with dipole terms.")] = True
    query_sample: Annotated[
        int, Option(help="Queries per KV head that indexes are built from."), AtLeast(64, 2**24)
    ] = 8192
    ttl: Annotated[str | None, Option(help="Time to live, for example 30m, 1.5h, 7d; default: for ever.")] = (
        None
    )
    salt: Annotated[str, Option(help="Keeps equal documents of different owners apart.")] = ""
    seed: Annotated[int, Option(help="Of the query sample and the clustering."), AtLeast(0)] = 0
    device: Annotated[
        str, Option(help="Where the model runs; auto: a GPU if there is one."), OneOf(AUTO, "cpu", "cuda")
    ] = AUTO
    device_memory: Annotated[
        int | None,
        Option(
            metavar="SIZE",
            help="Device memory to use beside the model's weights, for example 20GiB; keys and values that do not fit "
            "stay in host memory. auto: what is free once the model is loaded.",
        ),
        SIZE,
        AtLeast(1),
    ] = None

    def __post_init__(self) -> None:
        from prefill_worker.muse.settings import MuseSettings

        check_bounds(self)
        if not self.input:
            raise InvalidArgumentError("no input: pass at least one file, or - for standard input")
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
        if self.name is not None and not (self.name.isprintable() and 0 < len(self.name) <= 500):
            raise InvalidArgumentError(
                f"--name is {self.name[:80]!r}, expected 1 to 500 printable characters"
            )
        parse_ttl(self.ttl)
        parse_dense_layers(self.dense_layers)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods whose indexes to build: those given, else the default one; none where only indexes are named."""
        if self.method or self.index:
            return self.method
        from index_store.methods.presets import DEFAULT_METHOD

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
        return self.muse_block if self.attention == "muse" else self.chunk

    @property
    def torch_device(self) -> torch.device:
        """Where the model runs."""
        from index_store.memory.devices import pick_device

        return pick_device(self.device)


@dataclass(frozen=True, slots=True)
class AddIndexConfig:
    """Indexes to add to a stored context. context: its id, the first digits of it, or its name.

    method, index: as for a job that prefills.
    """

    context: Annotated[str, Option(help="Name or id of a stored context."), Filled()]
    store: StoreOption
    method: Annotated[tuple[str, ...], Option(help="Method whose indexes to add; may be repeated.")] = ()
    index: Annotated[
        tuple[str, ...],
        Option(help="Index to add, NAME or NAME:parameter=value,...; may be repeated.", metavar="NAME"),
    ] = ()
    device: Annotated[str, Option(help="auto, cpu or cuda."), OneOf(AUTO, "cpu", "cuda")] = AUTO

    def __post_init__(self) -> None:
        from index_store.memory.devices import pick_device

        if not (self.method or self.index):
            raise InvalidArgumentError("nothing to add: give --method or --index")
        pick_device(self.device)

    @property
    def torch_device(self) -> torch.device:
        """Where indexes are built."""
        from index_store.memory.devices import pick_device

        return pick_device(self.device)


def parse_ttl(text: str | None) -> timedelta | None:
    """A time to live such as 30m, 1.5h or 7d. Raises InvalidArgumentError for anything else, and out of range."""
    if text is None:
        return None
    match = _TTL.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"--ttl is {text[:80]!r}, expected a number and a unit, for example 30m, 1.5h or 7d"
        )
    seconds = float(match[1] or 0) * _TTL_SECONDS[match[2] or "s"]
    if not 1 <= seconds <= _LONGEST_TTL.total_seconds():
        raise InvalidArgumentError(
            f"--ttl is {text[:80]!r}, out of range: expected 1s to {_LONGEST_TTL.days}d; "
            "leave it out to keep the context for ever"
        )
    return timedelta(seconds=seconds)


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
