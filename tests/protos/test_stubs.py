"""The committed stubs are those of the committed .proto files, and every element of those is documented."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import google.api.resource_pb2 as resource
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc  # type: ignore[import-untyped]

import sparsekv.v1

PROTOS = Path(sparsekv.v1.__file__).parents[2]
FILES = ("context", "conversation", "generation")


def compile_file(name: str, folder: Path) -> FileDescriptorProto:
    """The descriptor that the installed compiler makes of a .proto file, with comments."""
    output = folder / f"{name}.binpb"
    google = Path(resource.__file__).parents[2]
    renamed = folder / "google/longrunning/operations.proto"  # the package has it under another name
    renamed.parent.mkdir(parents=True, exist_ok=True)
    renamed.write_bytes((google / "google/longrunning/operations_proto.proto").read_bytes())
    includes = [PROTOS, folder, google, Path(protoc.__file__).parent / "_proto"]
    arguments = ["protoc", *(f"-I{path}" for path in includes), "--include_source_info"]
    assert protoc.main([*arguments, f"--descriptor_set_out={output}", f"sparsekv/v1/{name}.proto"]) == 0
    return FileDescriptorSet.FromString(output.read_bytes()).file[-1]


def stub(name: str) -> ModuleType:
    return importlib.import_module(f"sparsekv.v1.{name}")


@pytest.mark.parametrize("name", FILES)
def test_stubs_are_current(name: str, tmp_path: Path) -> None:
    committed = FileDescriptorProto()
    stub(f"{name}_pb2").DESCRIPTOR.CopyToProto(committed)
    compiled = compile_file(name, tmp_path)
    compiled.ClearField("source_code_info")
    assert committed == without_json_names(compiled), (
        f"protos/sparsekv/v1/{name}.proto changed: run ops/protos"
    )


def test_a_request_has_one_budget_at_most() -> None:
    budget = stub("generation_pb2").GenerateRequest.DESCRIPTOR.oneofs_by_name["budget"]
    numbers = {field.name: field.number for field in budget.fields}
    assert numbers == {"keep_ratio": 12, "target_mass": 14, "token_budget": 15}


def without_json_names(descriptor: FileDescriptorProto) -> FileDescriptorProto:
    """Drops what the compiler adds for its plugins and the generated code leaves out."""
    pending = list(descriptor.message_type)
    while pending:
        message = pending.pop()
        pending.extend(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")
    return descriptor


@pytest.mark.parametrize("name", FILES)
def test_type_and_service_stubs_are_current(name: str, tmp_path: Path) -> None:
    compiled = compile_file(name, tmp_path)
    types = (PROTOS / "sparsekv" / "v1" / f"{name}_pb2.pyi").read_text()
    for message in compiled.message_type:
        assert f"class {message.name}(" in types
        for field in message.field:
            assert f"    {field.name}: " in types, f"{message.name}.{field.name} is missing: run ops/protos"
    services = stub(f"{name}_pb2_grpc")
    for service in compiled.service:
        methods = {name for name in vars(getattr(services, f"{service.name}Servicer")) if name[0] != "_"}
        assert methods == {method.name for method in service.method}


def test_plain_values_are_current(tmp_path: Path) -> None:
    written, generator = tmp_path / "values.py", PROTOS.parent / "ops/pages/plain_values.py"
    subprocess.run([sys.executable, str(generator), str(written)], check=True)
    assert written.read_text() == (PROTOS / "sparsekv/v1/values.py").read_text(), "run ops/protos"


@pytest.mark.parametrize("name", FILES)
def test_every_element_is_documented(name: str, tmp_path: Path) -> None:
    """Messages, fields, enums, values, services and methods all have a comment before them."""
    compiled = compile_file(name, tmp_path)
    commented = {
        tuple(location.path)
        for location in compiled.source_code_info.location
        if location.leading_comments.strip()
    }
    elements = dict(walk(compiled))
    assert len(elements) > 20, name
    assert [name for path, name in elements.items() if path not in commented] == []


@pytest.mark.parametrize("name", FILES)
def test_every_rpc_tells_its_errors(name: str, tmp_path: Path) -> None:
    compiled = compile_file(name, tmp_path)
    said = {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in compiled.source_code_info.location
    }
    silent = [
        rpc.name
        for number, service in enumerate(compiled.service)
        for n, rpc in enumerate(service.method)
        if "Errors: " not in (comment := said[6, number, 2, n]) and "Errors of the call: " not in comment
    ]
    assert silent == []


def walk(file: FileDescriptorProto) -> list[tuple[tuple[int, ...], str]]:
    """(path in the descriptor, name) of everything that needs a comment; oneofs are named by their members."""
    found: list[tuple[tuple[int, ...], str]] = []
    messages: list[tuple[tuple[int, ...], DescriptorProto]] = [
        ((4, number), message) for number, message in enumerate(file.message_type)
    ]
    while messages:
        path, message = messages.pop()
        if message.options.map_entry:
            continue
        found.append((path, message.name))
        found += [((*path, 2, n), f"{message.name}.{field.name}") for n, field in enumerate(message.field)]
        for number, enum in enumerate(message.enum_type):
            found.append(((*path, 4, number), enum.name))
            found += [((*path, 4, number, 2, n), value.name) for n, value in enumerate(enum.value)]
        messages += [((*path, 3, n), nested) for n, nested in enumerate(message.nested_type)]
    for number, service in enumerate(file.service):
        found.append(((6, number), service.name))
        found += [((6, number, 2, n), f"{service.name}.{rpc.name}") for n, rpc in enumerate(service.method)]
    return found
