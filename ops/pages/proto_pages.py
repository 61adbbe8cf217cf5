"""Messages and enumerations of the protos as tables, with what their comments say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import google.api.resource_pb2 as resource
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc  # type: ignore[import-untyped]

PROTOS = Path(__file__).resolve().parents[2] / "protos"
FILES = ("context", "generation", "conversation")

Place = tuple[int, ...]


def compiled(name: str) -> FileDescriptorProto:
    """The descriptor of one of our files, with its comments."""
    google = Path(resource.__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.binpb")
        renamed = Path(folder, "google/longrunning/operations.proto")  # as the package does not call it
        renamed.parent.mkdir(parents=True)
        renamed.write_bytes((google / "google/longrunning/operations_proto.proto").read_bytes())
        includes = [PROTOS, folder, google, Path(protoc.__file__).parent / "_proto"]
        arguments = ["protoc", *(f"-I{path}" for path in includes), "--include_source_info"]
        if protoc.main([*arguments, f"--descriptor_set_out={output}", f"sparsekv/v1/{name}.proto"]) != 0:
            raise RuntimeError(f"{name}.proto cannot be compiled")
        return FileDescriptorSet.FromString(output.read_bytes()).file[-1]


def comments_of(file: FileDescriptorProto) -> dict[Place, str]:
    """What is said of everything in a file, each in one line."""
    return {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
    }


def messages_page() -> str:
    """A heading and a table for every message and enumeration, in alphabetical order."""
    parts: dict[str, str] = {}
    for file in map(compiled, FILES):
        comments = {place: says.replace("|", "\\|") for place, says in comments_of(file).items()}
        for number, message in enumerate(file.message_type):
            parts.update(_message(message, message.name, (4, number), comments))
    return "\n".join(parts[name] for name in sorted(parts))


def _message(
    message: DescriptorProto, name: str, place: Place, comments: dict[Place, str]
) -> Iterator[tuple[str, str]]:
    """Parts by name: of the message, and of what is declared inside of it."""
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        f"| `{field.name}` | {_type(field, message, maps)} | {comments.get((*place, 2, number), '')} |"
        for number, field in enumerate(message.field)
    ]
    table = ["", "| field | type | what it is |", "|---|---|---|", *rows] if rows else []
    yield name, "\n".join([f"#### {name}", "", comments.get(place, ""), *table, ""])
    for number, enum in enumerate(message.enum_type):
        yield _enum(enum, f"{name}.{enum.name}", (*place, 4, number), comments)
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, f"{name}.{nested.name}", (*place, 3, number), comments)


def _enum(enum: EnumDescriptorProto, name: str, place: Place, comments: dict[Place, str]) -> tuple[str, str]:
    rows = [
        f"| `{value.name}` | {comments.get((*place, 2, number), '')} |"
        for number, value in enumerate(enum.value)
    ]
    head = [f"#### {name}", "", comments.get(place, ""), "", "| value | what it means |", "|---|---|"]
    return name, "\n".join([*head, *rows, ""])


def _type(field: FieldDescriptorProto, message: DescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    short = field.type_name.rpartition(".")[2]
    if short in maps:
        key, value = maps[short].field
        return f"map of {_type(key, message, {})} to {_type(value, message, {})}"
    plain = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = field.type_name.removeprefix(".").removeprefix("sparsekv.v1.") or plain
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    if field.proto3_optional:
        return f"{name}, may be left out"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name
