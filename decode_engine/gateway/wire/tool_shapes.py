"""Tools, and calls of them as OpenAI's endpoints spell them: in a member `function`, or flat."""

from __future__ import annotations

from typing import Any

from decode_engine.gateway.wire.parameters import JSON_TEXT, Members, Parameter, Variants, refused
from decode_engine.orders.kinds import FLAG, OBJECT, TEXT, Kind, list_of, listed
from decode_engine.orders.order import ToolChoice
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import MAX_TOOLS, Tool, check_tools, read_tools

_WORDS = ("none", "auto", "required")
_FUNCTION = (
    Parameter("name", TEXT, "Its name."),
    Parameter("description", TEXT, "What it does, for the model."),
    Parameter(
        "parameters", JSON_TEXT, "JSON schema of its arguments; without one it has none.", empty_counts=True
    ),
    Parameter(
        "strict", FLAG, "Whether arguments satisfy the schema also where the model is free to call or not."
    ),
    refused("input_schema", "`parameters` takes its place"),
    refused("defer_loading", "the model is told of all tools at the beginning"),
)
FUNCTION = Members("a function", _FUNCTION)
_OFFERED = "taken: clients offer it by themselves, and the model, which is not told of it, never uses it"
TOOL = Variants(
    "type",
    {
        "function": Members(
            "a tool",
            (
                Parameter("function", OBJECT, "The function; or its members stand here.", inside=FUNCTION),
                *_FUNCTION,
            ),
        ),
        **dict.fromkeys(
            ("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
            _OFFERED,
        ),
        "image_generation": _OFFERED,
        **dict.fromkeys(
            ("mcp", "file_search", "code_interpreter", "computer_use_preview", "namespace", "tool_search"),
            "the server calls nothing itself; give what can be called as functions",
        ),
        **dict.fromkeys(
            ("custom", "local_shell", "shell", "apply_patch"),
            "the model is told of functions alone; give it as one, with what it takes as an argument",
        ),
    },
    usual="function",
)


TOOL_CHOICE = Kind(
    "`none`, `auto`, `required`, a function by its name, or `allowed_tools`",
    lambda value: value in _WORDS if isinstance(value, str) else isinstance(value, dict),
    {"anyOf": [{"enum": list(_WORDS)}, OBJECT.schema]},
)
_CHOSEN = Parameter("name", TEXT, "The function's name.")
_FUNCTION_CHOSEN = Members(
    "a choice",
    (
        Parameter("function", OBJECT, "Which.", inside=Members("a function that is chosen", (_CHOSEN,))),
        _CHOSEN,
    ),
)
_ALLOWED = (
    Parameter(
        "mode", Kind("`auto` or `required`", lambda value: value in _WORDS[1:]), "Whether one is called."
    ),
    Parameter(
        "tools",
        Kind("a list of functions by their names", list_of(OBJECT, MAX_TOOLS), listed(OBJECT, MAX_TOOLS)),
        "Those of the tools that may be called; the model is told of all.",
        inside=Variants("type", {"function": _FUNCTION_CHOSEN}, usual="function"),
    ),
)
CHOICE = Variants(
    "type",
    {
        "function": _FUNCTION_CHOSEN,
        "allowed_tools": Members(
            "a choice of several",
            (
                Parameter(
                    "allowed_tools", OBJECT, "Which.", inside=Members("tools that are allowed", _ALLOWED)
                ),
                *_ALLOWED,
            ),
        ),
        **dict.fromkeys(_WORDS, Members("a choice by a word", ())),
    },
    usual="function",
)


def choice_of(given: dict[str, Any]) -> ToolChoice:
    """Whether tools are called. Raises InvalidArgumentError."""
    choice, names = given.get("tool_choice"), list[str]()
    mode: Any = "auto" if any(given.get("tools", ())) else "none"
    if isinstance(choice, dict) and choice["type"] in _WORDS:
        choice = choice["type"]
    if isinstance(choice, str):
        mode = choice
    elif choice is not None:
        allowed = choice.get("allowed_tools", choice) if choice["type"] == "allowed_tools" else None
        chosen = [choice] if allowed is None else allowed.get("tools", [])
        mode = "required" if allowed is None else allowed.get("mode", "auto")
        names = [one.get("function", one).get("name", "") for one in chosen]
        if not names or "" in names:
            raise InvalidArgumentError(
                f"tool_choice names no function, expected {TOOL_CHOICE.shown}", field="tool_choice"
            )
        if allowed is None:
            return ToolChoice(mode, tuple(names), single=True)
    single = mode != "none" and given.get("parallel_tool_calls") is False
    return ToolChoice(mode, tuple(names), single)


def tools_of(tools: list[dict[str, Any] | None]) -> tuple[Tool, ...]:
    """The functions that the tables have read; None is a tool that they have left out.

    Raises InvalidArgumentError, which names what cannot be used.
    """
    read = read_tools(
        [
            {name: one for name, one in tool.get("function", tool).items() if name != "type"}
            for tool in tools
            if tool is not None
        ]
    )
    check_tools(read)
    return read
