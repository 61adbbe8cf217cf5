"""The command line's flags: type, name and help of each. Their meaning: `prefill_worker.config.PrefillConfig`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


class TableLayout(StrEnum):
    """Layouts of query tables."""

    DENSE = "dense"
    LISTS = "lists"


class AttentionKind(StrEnum):
    """How the model attends while it reads."""

    EXACT = "exact"
    MUSE = "muse"


class DimensionSplit(StrEnum):
    """Which dimensions form a subspace."""

    STRIDED = "strided"
    CONTIGUOUS = "contiguous"


Model = Annotated[str, Option(help="'reader', or the path of a Hugging Face model folder.")]
Input = Annotated[list[Path], Option("--input", help="Text file; may be repeated; - is standard input.")]
MoreInputs = Annotated[list[Path] | None, Argument(metavar="[FILE]...", help="More text files.")]
Name = Annotated[str | None, Option(help="Display name; by default the first file's name.")]
Method = Annotated[
    list[str] | None,
    Option(help="Method whose indexes to build; may be repeated. Default: csattention, without --index."),
]
Index = Annotated[
    list[str] | None,
    Option(
        help="Index to build, NAME or NAME:parameter=value,...; may be repeated, and joins those of --method.",
        metavar="NAME",
    ),
]
Tables = Annotated[TableLayout | None, Option(help="Layout of query tables; default: the index's own.")]
Subspaces = Annotated[int | None, Option(help="Slices of query tables; default: the index's own.")]
Centroids = Annotated[int | None, Option(help="Centroids of query tables; default: the index's own.")]
Split = Annotated[DimensionSplit | None, Option(help="How slices are formed; default: the index's own.")]
Calibration = Annotated[Path | None, Option(help="Example prompts: one question per line, or .jsonl.")]
DenseLayers = Annotated[str, Option(help="auto, none, or layers such as 0,1.")]
Dtype = Annotated[str, Option(help="Of stored keys and values: auto, float32, float16, bfloat16.")]
Chunk = Annotated[int, Option(help="Tokens per forward pass; with --attention muse, passes are its blocks.")]
Attention = Annotated[
    AttentionKind, Option(help="exact, or muse: the past approximated by clusters, for very long contexts.")
]
MuseBlock = Annotated[int, Option(help="Tokens of a block that MuSe attends exactly.")]
MuseClusters = Annotated[int, Option(help="MuSe's clusters of queries and of keys.")]
MuseCap = Annotated[float, Option(help="MuSe's largest cluster, in multiples of the mean one.")]
MuseIterations = Annotated[int, Option(help="MuSe's iterations of k-means.")]
MuseDipole = Annotated[bool, Option(help="MuSe with dipole terms.")]
QuerySample = Annotated[int, Option(help="Queries per KV head that indexes are built from.")]
Ttl = Annotated[str | None, Option(help="Time to live, for example 30m, 12h, 7d; default: for ever.")]
Salt = Annotated[str, Option(help="Keeps equal documents of different owners apart.")]
Seed = Annotated[int, Option(help="Of the query sample and the clustering.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
DeviceMemory = Annotated[
    str,
    Option(
        metavar="SIZE",
        help="Device memory to use beside the model's weights, for example 20GiB; keys and values that do not fit stay "
        "in host memory. auto: what is free once the model is loaded.",
    ),
]
