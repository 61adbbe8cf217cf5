"""What a prefill job is told: the same names as the command line's flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from index_store.errors import InvalidArgumentError
from index_store.methods.method import DEFAULT_METHOD
from index_store.store.dtypes import KV_DTYPES
from prefill_worker.muse.settings import MuseSettings

_TTL = re.compile(r"0+|([0-9]+)([smhd])")
_TTL_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_TTL = timedelta(days=36_500)
_MOST_DIGITS = 10  # of a number in range: seconds


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """One job. `input` are files in order, `-` is standard input.

    method: methods whose indexes the context shall hold; with none, only the indexes named. index: further indexes by
        name, each perhaps with build parameters ("key_clusters:window=4096,keys_per_cluster=32"). tables, subspaces,
        centroids, split: build parameters of query tables, None for the index's own. dense_layers: "auto", "none" or
        layer numbers ("0,1").
    dtype: how K and V are stored, "auto" for the checkpoint's dtype. chunk: tokens per forward pass.
    attention: "exact", or "muse" for what attends to the past through clusters: clusters, exact blocks and the rest of
        it are the muse_ settings (`prefill_worker.muse.settings`), and a pass carries one block, whatever chunk says.
    query_sample: queries per layer and KV head that indexes are built from (tokens times group).
    ttl: time to live ("30m", "12h", "7d"), None for ever. salt: keeps equal documents of different owners apart.
    device_memory: bytes of the device's memory that the job may use beside the model's weights, None for what is free.
    """

    model: str
    store: Path
    input: tuple[Path, ...]
    name: str | None = None
    method: tuple[str, ...] = (DEFAULT_METHOD,)
    index: tuple[str, ...] = ()
    tables: str | None = None
    subspaces: int | None = None
    centroids: int | None = None
    split: str | None = None
    calibration: Path | None = None
    dense_layers: str = "auto"
    dtype: str = "auto"
    chunk: int = 2048
    attention: str = "exact"
    muse_block: int = 8192
    muse_clusters: int = 64
    muse_cap: float = 1.5
    muse_iterations: int = 1
    muse_dipole: bool = True
    query_sample: int = 8192
    ttl: str | None = None
    salt: str = ""
    seed: int = 0
    device: str = "auto"
    device_memory: int | None = None

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--chunk", self.chunk, 1),
            ("--query-sample", self.query_sample, 64),
            ("--seed", self.seed, 0),
            ("--device-memory", 1 if self.device_memory is None else self.device_memory, 1),
        ):
            if value < least:
                raise InvalidArgumentError(f"{flag} is {value}, expected at least {least}")
        if not self.input:
            raise InvalidArgumentError("no input: pass at least one file, or - for standard input")
        if len(set(self.method)) != len(self.method) or not (self.method or self.index):
            raise InvalidArgumentError(
                f"--method is {', '.join(self.method) or 'empty'}, expected one or more different methods"
            )
        if self.dtype != "auto" and self.dtype not in KV_DTYPES:
            raise InvalidArgumentError(
                f"--dtype is {self.dtype!r}, expected auto or one of {', '.join(KV_DTYPES)}"
            )
        if self.attention not in ("exact", "muse"):
            raise InvalidArgumentError(f"--attention is {self.attention!r}, expected exact or muse")
        given = replace(self._muse_given, seed=0)  # raises for what is out of range
        if self.attention == "exact" and given != MuseSettings():
            raise InvalidArgumentError("--muse-... settings shape --attention muse, which was not asked for")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidArgumentError(f"--device is {self.device!r}, expected auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InvalidArgumentError("--device is cuda, but torch sees no CUDA device; use cpu or auto")
        if self.name is not None and not (self.name.isprintable() and 0 < len(self.name) <= 500):
            raise InvalidArgumentError(
                f"--name is {self.name[:80]!r}, expected 1 to 500 printable characters"
            )
        parse_ttl(self.ttl)
        parse_dense_layers(self.dense_layers)

    @property
    def muse(self) -> MuseSettings | None:
        """The settings of approximate attention; None where attention is exact."""
        return self._muse_given if self.attention == "muse" else None

    @property
    def _muse_given(self) -> MuseSettings:
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
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def parse_ttl(text: str | None) -> timedelta | None:
    """A time to live such as 30m, 12h or 7d. Raises InvalidArgumentError for anything else, and out of range."""
    if text is None:
        return None
    match = _TTL.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"--ttl is {text!r}, expected a whole number and a unit, for example 30m, 12h or 7d"
        )
    digits = (match[1] or "").lstrip("0")
    seconds = int(digits) * _TTL_SECONDS[match[2]] if 0 < len(digits) <= _MOST_DIGITS else 0
    if not 0 < seconds <= _LONGEST_TTL.total_seconds():
        raise InvalidArgumentError(
            f"--ttl is {text[:80]!r}, out of range: expected more than 0 and at most {_LONGEST_TTL.days}d; "
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
