"""What the programs' settings accept."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_engine.cli.ask_command import AskConfig
from decode_engine.cli.tune_command import TuneConfig
from decode_engine.evaluation.settings import EvaluationConfig
from decode_engine.rpc.door.options import Address, is_loopback
from decode_engine.settings.config import MAX_LANES, MAX_SLOT_SHARE, ServeConfig
from index_store.cli.options import Spelled, options_of
from index_store.errors import InvalidArgumentError
from index_store.memory.devices import context_device, default_budget, memory_budget, pick_device
from index_store.memory.placement import USUAL_ROOM, MemoryBytes


@pytest.mark.parametrize("text", ["127.0.0.1:0", "localhost:50051", "[::1]:1", "some.host:65535"])
def test_addresses(text: str) -> None:
    Address().check("--server", text)


@pytest.mark.parametrize("text", ["", "localhost", ":80", "host:", "host:x", "host:65536", "::1:80", "a b:1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--server is .*, expected HOST:PORT"):
        Address().check("--server", text)


def test_loopback() -> None:
    assert all(is_loopback(address) for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "127.1.2.3:1"))
    assert not any(is_loopback(address) for address in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1"))


def test_too_many_lanes_and_search_threads_are_refused() -> None:
    for field, flag, value, expected in (
        ("lanes", "--lanes", MAX_LANES + 1, f"1 to {MAX_LANES}"),
        ("slot_share", "--slot-share", MAX_SLOT_SHARE + 1, f"1 to {MAX_SLOT_SHARE}"),
        ("threads", "--threads", 10**6, "at most"),
        ("search_threads", "--search-threads", 10**6, "at most"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^{flag} is {value}, expected {expected}"):
            ServeConfig(Path(), "reader", **{field: value})


def test_slots_are_as_many_as_contexts_have_otherwise() -> None:
    assert ServeConfig(Path(), "reader").slot_share == USUAL_ROOM.share


@pytest.mark.parametrize("device", ["cuda:0", "gpu", "CPU", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--device is '{device}', expected auto, cpu or cuda"):
        ServeConfig(Path(), "reader", device=device).check_devices()
    with pytest.raises(InvalidArgumentError, match="expected auto, cpu or cuda"):
        pick_device(device)


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == pick_device("cpu").type == "cpu"
    for refuse in (pick_device, lambda name: ServeConfig(Path(), "reader", device=name).check_devices()):
        with pytest.raises(InvalidArgumentError, match="--device is cuda, but torch sees no CUDA device"):
            refuse("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == pick_device("cuda").type == "cuda"
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({}, ("\n",)),
        ({"raw": True}, ()),
        ({"stop": ("x",)}, ("x",)),
        ({"stop": ("x",), "raw": True}, ("x",)),
        ({"regex": "a"}, ()),
        ({"regex": "a", "stop": ("x",)}, ("x",)),
    ],
)
def test_questions_end_at_the_line_break_unless_told_otherwise(
    options: dict[str, Any], stops: tuple[str, ...]
) -> None:
    config = AskConfig(context="c", prompt="q", **options)
    assert config.generate_options("q", raw=config.raw)["stop"] == stops


def test_placement_and_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig(Path(), "reader").placement == "auto"
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert memory_budget(cpu, None, None, 2**40) == MemoryBytes(host=default_budget(cpu))
    assert default_budget(cpu) == 8 * 2**30
    assert memory_budget(cpu, 7, None, 2**40) == MemoryBytes(host=7)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
    assert memory_budget(cuda, None, None, 2**40) == MemoryBytes(2**39, 50 * 2**30)
    assert memory_budget(cuda, 7, 9, 2**40) == MemoryBytes(7, 9)
    assert (context_device(cpu), context_device(cuda)) == (None, cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="expected auto, device, hybrid"):
        ServeConfig(Path(), "reader", placement="disk").check_devices()
    with pytest.raises(InvalidArgumentError, match="--placement is hybrid, but the CPU computes"):
        ServeConfig(Path(), "reader", placement="hybrid").check_devices()
    with pytest.raises(InvalidArgumentError, match="--device-memory is given, but the CPU computes"):
        ServeConfig(Path(), "reader", device_memory=5).check_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ServeConfig(Path(), "reader", placement="hybrid", device_memory=5).check_devices()


@pytest.mark.parametrize("config", [ServeConfig, EvaluationConfig, TuneConfig])
def test_a_flags_default_means_the_fields_default(config: type[Any]) -> None:
    for field, _, marks in options_of(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        for mark in marks:
            if isinstance(mark, Spelled):
                assert mark.read(mark.default) == default


@pytest.mark.parametrize(("cores", "doors"), [(1, 0), (3, 0), (4, 1), (11, 2), (16, 4), (128, 4)])
def test_doors_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, doors: int) -> None:
    monkeypatch.setattr("decode_engine.settings.config.available_cores", lambda: cores)
    assert ServeConfig(store=tmp_path, model="m", threads=1, search_threads=1).doors == doors
