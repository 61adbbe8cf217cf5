"""What the benchmarks' options say."""

from __future__ import annotations

import re
from dataclasses import replace

import typer

from index_store.methods.method import Method
from index_store.methods.presets import get_method


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """LENGTHxBATCH, comma-separated. Raises typer.BadParameter for anything else."""
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part)
        if found is None:
            raise typer.BadParameter(f"shape is {part!r}, expected LENGTHxBATCH such as 131072x1")
        shapes.append((int(found[1]), int(found[2])))
    return shapes


def parse_shared_shapes(text: str) -> list[tuple[int, int, int]]:
    """LENGTHxBATCH or LENGTHxBATCH@CONTEXTS, comma-separated: also how many contexts there are, BATCH by default.

    Raises typer.BadParameter for anything else.
    """
    shapes = []
    for part in text.split(","):
        shape, shared, count = part.partition("@")
        ((length, batch),) = parse_shapes(shape)
        contexts = parse_counts(count)[0] if shared else batch
        if contexts > batch:
            raise typer.BadParameter(f"shape is {part!r}, expected no more contexts than sessions")
        shapes.append((length, batch, contexts))
    return shapes


def parse_counts(text: str, least: int = 1) -> list[int]:
    """Numbers, comma-separated. Raises typer.BadParameter for anything else."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < least:
        raise typer.BadParameter(f"numbers are {text!r}, expected some from {least} on, such as 1,2")
    return counts


def parse_method(text: str) -> Method:
    """NAME[:KEEP][/m8][/pooled][/2bits]: m8 are tables of 8 subspaces with 64 centroids, pooled searches once for a
    group, 2bits (or 3bits, 4bits) are the codes of a coarse copy."""
    expression, *variants = text.split("/")
    name, _, keep = expression.partition(":")
    method = get_method(name, float(keep) if keep else None)
    for variant in variants:
        if variant == "m8" and method.index is not None:
            parameters = {**method.index.parameters, "subspaces": 8, "centroids": 64}
            method = replace(method, index=replace(method.index, name="m8_tables", parameters=parameters))
        elif variant == "pooled":
            method = replace(method, search={**method.search, "group": "pooled"})
        elif variant in ("2bits", "3bits", "4bits") and method.index is not None:
            bits = int(variant[0])
            index = method.index.with_parameters(key_bits=bits, value_bits=bits)
            if index != method.index:  # beside one of other bits in the same context
                index = replace(index, name=f"{index.name}_{variant}")
            method = replace(method, index=index)
        else:
            raise typer.BadParameter(f"variant is {variant!r}, expected m8, pooled, 2bits, 3bits or 4bits")
    return method
