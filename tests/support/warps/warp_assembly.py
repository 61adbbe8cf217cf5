"""Inline assembly of kernels that `warp_interpreter` runs: tensor cores' products, and instructions over registers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support.warps.warp_numbers import Numbers


def multiplied(asm: str, lanes: list[Any]) -> tuple[Numbers, ...]:
    """A product of tensor cores, by the registers of its operands, each [8, 4]: as PTX says which lane has what."""
    whole = "u8.s8" in asm
    rows, columns, before = (lanes[:4], lanes[4:6], lanes[6:]) if whole else (
        [lanes[0], lanes[0], lanes[1], lanes[1]], lanes[2:4], lanes[4:]
    )  # fmt: skip
    kinds = (np.uint8, np.int8) if whole else (np.float16, np.float16)
    # [8, 4, numbers of a register] for each; those of a row, or of a column, lie along its four lanes.
    left, right = (
        [np.ascontiguousarray(each).view(kind).reshape(8, -1).astype(np.float64) for each in some]
        for some, kind in zip((rows, columns), kinds, strict=True)
    )
    upper, lower = np.hstack([left[0], left[2]]), np.hstack([left[1], left[3]])
    exact = np.vstack([upper, lower]) @ np.hstack(right).T  # [16, 8]
    found = []
    for at, register in enumerate(before):
        own = exact[at // 2 * 8 : at // 2 * 8 + 8, at % 2 :: 2]
        total = own + register.astype(np.float64)
        found.append(Numbers(total.astype(np.int64).astype(np.int32) if whole else total.astype(np.float32)))
    return tuple(found)


def halves(asm: str, args: list[Numbers], dtypes: Any) -> Any:
    """Runs instructions over pairs of float16 numbers, a register of each lane at a time."""
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


def unpacked(asm: str, words: list[Numbers], count: int) -> tuple[Numbers, ...]:
    """Runs instructions over pairs of neighbouring registers: each result is two float16 numbers, one of each."""
    axis = int(words[0].layout.reg_bases[0][1] != 0)
    registers = {}
    for number, each in enumerate(words):
        for half in range(2):
            taken = np.take(each.array, range(half, each.array.shape[axis], 2), axis)
            registers[f"${count + 2 * number + half}"] = taken.view(np.uint32)
    for line in filter(None, map(str.strip, re.sub(r"[{}]|\.reg \.b32 \w;", "", asm).split(";"))):
        name, target, *operands = line.replace(",", "").split()
        a, *others = (registers.get(each, each) for each in operands)
        if name in ("shr.b32", "shl.b32"):
            by = np.uint32(others[0])
            registers[target] = a >> by if name == "shr.b32" else a << by
        elif name == "and.b32":
            registers[target] = a & np.uint32(int(others[0], 16))
        elif name == "lop3.b32":
            assert others[2] == "0xe4"
            mask = np.uint32(int(others[1], 16))
            registers[target] = (a & mask) | (others[0] & ~mask)
        else:
            assert name == "prmt.b32", name
            halves = {"5": others[0], "7": others[0], "1": a, "3": a}
            low, high = others[1][4:], others[1][2:4]
            taken = [halves[pair[0]] >> np.uint32(16 if pair[0] in "37" else 0) for pair in (low, high)]
            registers[target] = (taken[0] & np.uint32(0xFFFF)) | (taken[1] << np.uint32(16))
    found = []
    for number in range(count):
        pair = registers[f"${number}"]
        halves = [(pair >> np.uint32(at) & np.uint32(0xFFFF)).astype(np.uint16) for at in (0, 16)]
        numbers = np.stack([half.view(np.float16) for half in halves], axis + 1)
        found.append(Numbers(numbers.reshape(words[0].array.shape)))
    return tuple(found)
