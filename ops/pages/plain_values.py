"""Writes protos/sparsekv/v1/values.py: messages of the API as plain values, for programs in Python.

Run by `ops/protos`. A message becomes a frozen dataclass with its fields under their names, in their order, each with
the default that protobuf gives it; a request the options by which a program says it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from proto_pages import FILES, PROTOS, Place, comments_of, compiled

TARGET = PROTOS / "sparsekv" / "v1" / "values.py"


@dataclass(frozen=True)
class Shape:
    """How a message becomes a class. name: of the class. first: fields before those of the message. left_out: fields
    that are not there. flat: a field whose fields stand here in its place. renamed: names of fields."""

    name: str
    first: tuple[tuple[str, str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    flat: str = ""
    renamed: tuple[tuple[str, str], ...] = ()


_OPERATION = (
    ("name", 'str = ""', "`operations/{operation}`."),
    ("done", "bool = False", "Whether it has ended."),
)
SHAPES = {
    "Context.Index": Shape("IndexInfo"),
    "Context": Shape("ContextInfo"),
    "ListContextsResponse": Shape("ContextPage"),
    "WarmContextResponse": Shape("WarmResult"),
    "CreateContextMetadata": Shape(
        "OperationState", first=_OPERATION, renamed=(("context", "context_name"),)
    ),
    "Upload": Shape("UploadInfo"),
    "TokenLogprob.Alternative": Shape("Alternative"),
    "TokenLogprob": Shape("TokenLogprob"),
    "ToolCallPart": Shape("ToolCallPart"),
    "Look.Layers": Shape("LayersLooked"),
    "Look": Shape("Look"),
    "GenerateResponse": Shape("Piece", left_out=("summary", "usage", "waiting", "prompt_logprobs")),
    "Waiting": Shape("Waiting"),
    "Usage": Shape("Usage"),
    "Timings": Shape("Timings"),
    "SelectionFigures": Shape("SelectionFigures"),
    "Explanation": Shape("Explanation"),
    "GenerationSummary": Shape("Summary", flat="usage"),
    "TokenizeResponse": Shape("TokenizedText"),
    "Method": Shape("MethodInfo"),
    "ListMethodsResponse": Shape("MethodList"),
    "ServerStatus": Shape("ServerStatus"),
    "Tenant.Limit": Shape("TenantLimit"),
    "Tenant": Shape("TenantUse"),
    "ListTenantsResponse": Shape("TenantList"),
}
OPTIONS = {
    "GenerateRequest": Shape("GenerateFields", left_out=("context",)),
    "CreateContextRequest": Shape("CreateFields", left_out=("text", "upload", "again")),
}
"""Fields of other messages are said in other ways: they are left out, too."""
ALWAYS_SET = ("Context.create_time", "Upload.expire_time")
MAY_BE_UNSET = ("GenerationSummary.explanation",)

_HEAD = '''"""Messages of the API as plain values. Made from the protos by `ops/protos`; not to be changed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypedDict
'''
_EPOCH = "datetime.fromtimestamp(0, UTC)"
_SCALARS = {"bool": "False", "bytes": 'b""', "float": "0.0", "int": "0", "str": '""'}


class Messages:
    """All of the protos, by their names, with what their comments say."""

    def __init__(self) -> None:
        self.messages: dict[str, DescriptorProto] = {}
        self.says: dict[str, str] = {}
        for file in map(compiled, FILES):
            comments = comments_of(file)
            for number, message in enumerate(file.message_type):
                self._add(message, message.name, (4, number), comments)

    def _add(self, message: DescriptorProto, name: str, place: Place, comments: dict[Place, str]) -> None:
        self.messages[name], self.says[name] = message, comments.get(place, "")
        for number, field in enumerate(message.field):
            self.says[f"{name}.{field.name}"] = comments.get((*place, 2, number), "")
        for number, nested in enumerate(message.nested_type):
            self._add(nested, f"{name}.{nested.name}", (*place, 3, number), comments)

    def written(self) -> str:
        """The module."""
        classes = [self._class(name, shape) for name, shape in SHAPES.items()]
        options = [self._options(name, shape) for name, shape in OPTIONS.items()]
        table = [f'    "sparsekv.v1.{name}": {shape.name},' for name, shape in SHAPES.items()]
        says = '"""The class of each message, by its full name."""'
        return "\n".join(
            [_HEAD, *classes, *options, "", "CLASSES: Mapping[str, type[Any]] = {", *table, "}", says, ""]
        )

    def _class(self, name: str, shape: Shape) -> str:
        fields: list[tuple[str, str, str]] = list(shape.first)
        for field in self._fields(name, shape):
            if field.name == shape.flat:
                inner = Shape("", left_out=())
                inside = field.type_name.removeprefix(".sparsekv.v1.")
                fields += [self._member(inside, each) for each in self._fields(inside, inner)]
            else:
                given, type_, says = self._member(name, field)
                fields.append((dict(shape.renamed).get(given, given), type_, says))
        head = ["", "@dataclass(frozen=True, slots=True)", f"class {shape.name}:", *_doc(self.says[name]), ""]
        return "\n".join([*head, *_lines(fields)])

    def _options(self, name: str, shape: Shape) -> str:
        fields = []
        for field in self._fields(name, shape):
            plain = self._plain(field)
            map_ = self._map(name, field)
            if map_ is not None:
                type_ = f"Mapping[{', '.join(map_)}]"
            elif field.label == field.LABEL_REPEATED:
                type_ = "str | Sequence[str]" if plain == "str" else f"Sequence[{plain}]"
            elif plain in _SCALARS:
                type_ = plain
            elif plain == "Duration":
                fields.append((f"{field.name}_s", "float | None", self.says[f"{name}.{field.name}"]))
                continue
            else:
                continue
            fields.append((field.name, f"{type_} | None", self.says[f"{name}.{field.name}"]))
        head = ["", f"class {shape.name}(TypedDict, total=False):", *_doc(self.says[name]), ""]
        return "\n".join([*head, *_lines(fields)])

    def _fields(self, name: str, shape: Shape) -> Iterator[FieldDescriptorProto]:
        return (field for field in self.messages[name].field if field.name not in shape.left_out)

    def _member(self, message: str, field: FieldDescriptorProto) -> tuple[str, str, str]:
        """Name, type with default, and what is said of it."""
        path = f"{message}.{field.name}"
        plain, says, map_ = self._plain(field), self.says[path], self._map(message, field)
        one_of = field.HasField("oneof_index")
        if map_ is not None:
            return field.name, f"Mapping[{', '.join(map_)}] = field(default_factory=dict)", says
        if field.label == field.LABEL_REPEATED:
            return field.name, f"tuple[{plain}, ...] = ()", says
        if plain == "Duration":
            return f"{field.name}_s", "float | None = None", says
        if plain == "datetime" and path in ALWAYS_SET:
            return field.name, f"datetime = {_EPOCH}", says
        if one_of or plain == "datetime" or path in MAY_BE_UNSET:
            return field.name, f"{plain} | None = None", says
        if plain in _SCALARS:
            return field.name, f"{plain} = {_SCALARS[plain]}", says
        return field.name, f"{plain} = field(default_factory=lambda: {plain}())", says

    def _plain(self, field: FieldDescriptorProto) -> str:
        kinds = FieldDescriptorProto
        if field.type == kinds.TYPE_ENUM:
            return "str"
        if field.type == kinds.TYPE_MESSAGE:
            name = field.type_name.removeprefix(".sparsekv.v1.")
            others = {".google.protobuf.Timestamp": "datetime", ".google.protobuf.Duration": "Duration"}
            return SHAPES[name].name if name in SHAPES else others.get(name, name)
        scalars = {kinds.TYPE_STRING: "str", kinds.TYPE_BYTES: "bytes", kinds.TYPE_BOOL: "bool"}
        floats = (kinds.TYPE_DOUBLE, kinds.TYPE_FLOAT)
        return scalars.get(field.type, "float" if field.type in floats else "int")

    def _map(self, message: str, field: FieldDescriptorProto) -> tuple[str, str] | None:
        entry = self.messages.get(field.type_name.removeprefix(".sparsekv.v1."))
        if entry is None or not entry.options.map_entry:
            return None
        key, value = entry.field
        return self._plain(key), self._plain(value)


def _doc(says: str, indent: str = "    ") -> list[str]:
    escaped = says.replace("\\", "\\\\") + (" " if says.endswith('"') else "")
    return textwrap.wrap(f'"""{escaped}"""', 118, initial_indent=indent, subsequent_indent=indent)


def _lines(fields: list[tuple[str, str, str]]) -> list[str]:
    return [line for name, type_, says in fields for line in (f"    {name}: {type_}", *_doc(says))] + [""]


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else TARGET).write_text(Messages().written())
