"""Inline assembly of kernels that `warp_interpreter` runs: tensor cores' products, and instructions over registers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support.warps.warp_numbers import Numbers


def multiplied(asm: str, lanes: list[Any]) -> tuple[Numbers, ...]:
    """A product of tensor cores, by the registers of its operands, each [8, 4]: as PTX says which lane has what."""
    if "f16" in asm:
        rows, columns, before = [lanes[0], lanes[0], lanes[1], lanes[1]], lanes[2:4], lanes[4:]
        kinds: tuple[Any, Any] = (np.float16, np.float16)
    else:
        count = 4 if "k32" in asm else 2
        rows, columns, before = lanes[:count], lanes[count : count + count // 2], lanes[-4:]
        kinds = (np.uint8, np.int8 if "u8.s8" in asm else np.uint8)
    # [8, 4, numbers of a register] for each; those of a row, or of a column, lie along its four lanes.
    left, right = (
        [np.ascontiguousarray(each).view(kind).reshape(8, -1).astype(np.float64) for each in some]
        for some, kind in zip((rows, columns), kinds, strict=True)
    )
    upper, lower = np.hstack(left[::2]), np.hstack(left[1::2])
    exact = np.vstack([upper, lower]) @ np.hstack(right).T  # [16, 8]
    found = []
    for at, register in enumerate(before):
        own = exact[at // 2 * 8 : at // 2 * 8 + 8, at % 2 :: 2]
        total = own + register.astype(np.float64)
        found.append(Numbers(total.astype(np.float32 if "f16" in asm else np.int32)))
    return tuple(found)


def registers_run(asm: str, args: list[Numbers], dtypes: Any) -> Any:
    """Runs instructions over bytes and pairs of float16 numbers, a register of each lane at a time."""
    outputs = len(dtypes) if isinstance(dtypes, tuple) else 1
    registers: dict[str, Any] = {}
    for number, each in enumerate(args):
        registers[f"${outputs + number}"] = np.ascontiguousarray(each.array)

    def pair(name: str) -> Any:
        return registers[name].view(np.float16).reshape(*registers[name].shape, 2)

    for line in filter(None, map(str.strip, re.sub(r"^\{|\}$|\.reg \.\w+ \w;", "", asm).split(";"))):
        name, operands = line.split(None, 1)
        target, *others = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
        if name == "mov.b32" and target.startswith("{"):
            for at, half in enumerate(re.findall(r"\w+", target)):
                registers[half] = pair(others[0])[..., at]
        elif name == "mov.b32" and others[0].startswith("{"):
            both = [registers[half] for half in re.findall(r"\w+", others[0])]
            registers[target] = np.stack(both, -1).view(np.int32)[..., 0]
        elif name == "mov.b32":
            taken = others[0]
            registers[target] = (
                np.array(int(taken, 16), np.uint32).view(np.int32)[None]
                if taken[0] == "0"
                else registers[taken]
            )
        elif name == "prmt.b32":
            four = np.stack(
                [registers[each].view(np.uint8).reshape(*registers[each].shape, 4) for each in others[:2]], -2
            )
            eight = four.reshape(*four.shape[:-2], 8)
            chosen = [int(digit, 16) for digit in reversed(others[2][2:])]
            registers[target] = np.ascontiguousarray(eight[..., chosen]).view(np.int32)[..., 0]
        elif name == "cvt.f32.f16":
            registers[target] = registers[others[0]].astype(np.float32)
        elif name == "cvt.rn.f16.f32":
            with np.errstate(over="ignore"):
                registers[target] = registers[others[0]].astype(np.float16)
        elif name.endswith(".f16"):
            numbers = [registers[each] for each in others]
            registers[target] = np.abs(numbers[0]) if name.startswith("abs") else np.maximum(*numbers)
        else:
            numbers = [pair(each).astype(np.float64) for each in others]
            compute = {
                "abs": np.abs, "max": np.maximum, "mul": np.multiply, "add": np.add,
                "sub": np.subtract, "fma": lambda a, b, c: a * b + c,
            }[name.split(".")[0]]  # fmt: skip
            with np.errstate(all="ignore"):
                registers[target] = np.ascontiguousarray(compute(*numbers).astype(np.float16)).view(np.int32)[
                    ..., 0
                ]
    shape = args[0].array.shape
    found = [Numbers(np.broadcast_to(registers[f"${at}"], shape)) for at in range(outputs)]
    return tuple(found) if isinstance(dtypes, tuple) else found[0]


def by_fours(asm: str, numbers: Numbers, dtypes: Any) -> tuple[Numbers, ...]:
    """Runs instructions over four int32 numbers at a time, which make a register of four bytes for each result.

    numbers: [8, keys, tiles, columns]; two or four keys, and where these are two, columns, are neighbours.
    """
    lanes, keys, tiles, columns = numbers.array.shape
    width = 4 // min(keys, 4)
    apart = numbers.array.reshape(lanes, -1, 4 // width, tiles, columns // width, width)
    order = (0, 1, 3, 4, 5, 2)
    fours = np.ascontiguousarray(apart.transpose(order)).reshape(-1, 4)
    registers = [Numbers(fours[:, at]) for at in range(4)]
    found = registers_run(asm, registers, (None,) * len(dtypes))
    bytes_of = [
        np.ascontiguousarray(each.array).view(np.int8).reshape(*np.array(apart.shape)[list(order)])
        for each in found
    ]
    back = np.argsort(order)
    return tuple(Numbers(each.transpose(back).reshape(numbers.array.shape)) for each in bytes_of)
