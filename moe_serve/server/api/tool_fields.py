"""The tools and the reasoning of a chat: which tools there are, and whether one must be called.

A tool is a function, whose arguments are JSON, or OpenAI's custom tool, whose input is text, maybe of a grammar.
Models know functions alone, so a custom tool is shown to them as a function of one text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.errors import RequestError
from moe_serve.server.api.params import schema_constraint
from moe_serve.server.edge.body import show
from moe_serve.structured.json_schema import LENIENT, lenient, moved, with_options

MAX_TOOLS = 128
MAX_BYTES = 1 << 20  # of all tools, as JSON
EXAMPLE = 'send {"type": "function", "function": {"name": "f", "parameters": {…}}}'
EXAMPLE_CHOICE = '{"type": "function", "function": {"name": "f"}}'
KINDS = ("function", "custom")
INPUT = "input"  # the parameter by which a model calls a custom tool
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")  # and -x: the end of a comment would close no group
_TOKENS = re.compile(r"\\.|\[\^?\]?|[\]()]", re.DOTALL)  # of a regular expression, that tell where its groups end
_SYNTAXES = {"lark": "grammar", "regex": "regex"}  # kinds of constraints
_FORMAT = '{"type": "grammar", "grammar": {"syntax": "lark" or "regex", "definition": "…"}}, or {"type": "text"}'


@dataclass(frozen=True)
class ToolUse:
    """How an answer may call the client's tools.

    schemas:  of the parameters of each tool, by name
    choice:   "named": `name` must be called, once;  "required": at least one must
    parallel: whether there may be several calls
    inputs:   the form of the input of each custom tool, by name; None: any text
    """

    schemas: dict[str, dict[str, Any]]
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parallel: bool = True
    inputs: dict[str, Constraint | None] = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of calls alone."""
        return self.choice in ("named", "required")

    @property
    def only_input(self) -> Constraint | None:
        """The form of the output where it is the input of the one custom tool that can be called; None: it is not."""
        names = {"named": [self.name], "required": list(self.schemas)}.get(self.choice, [])
        return self.inputs.get(names[0]) if len(names) == 1 else None

    @property
    def _options(self) -> dict[str, Any]:
        """llguidance's options of all tools' schemas, merged: a form has one set, lenient where all of them are."""
        given = [schema.get("x-guidance") or {} for schema in self.schemas.values()]
        named = [each for each in given if isinstance(each, dict)]
        options = {name: value for each in named for name, value in each.items()}
        return {name: options[name] for name in options if name not in LENIENT or all(name in each for each in named)}

    def constraint(self) -> Constraint | None:
        """Returns the form of the output; None if it is free."""
        if self.only_input is not None:
            return self.only_input
        if self.choice == "named":
            path = f"tools[{list(self.schemas).index(self.name)}].function.parameters"
            return schema_constraint(_object_schema(self.schemas[self.name]), path)
        if self.choice != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name in self.schemas
        ]
        most = {} if self.parallel else {"maxItems": 1}
        schemas = {name: moved(_object_schema(schema), name) for name, schema in self.schemas.items()}
        return schema_constraint(
            {
                "type": "array",
                "minItems": 1,
                **most,
                "items": {"anyOf": calls},
                "$defs": schemas,
                "x-guidance": self._options,
            },
            "tools",
        )


@dataclass(frozen=True)
class ReasoningUse:
    """How the client wants the reasoning. separate: apart from the content;  included: at all;  streamed: at once"""

    separate: bool = True
    included: bool = True
    streamed: bool = True


def allowed(tools: list[dict[str, Any]] | None, choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """Returns the tools that OpenAI's tool_choice {"type": "allowed_tools"} allows, and its mode; others as they are.

    Raises RequestError where it is none, or names no tool of the call.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = choice.get("allowed_tools", choice)  # chats have an object inside, responses do not
    mode, chosen = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(chosen, list):
        raise RequestError(
            'tool_choice.allowed_tools is not as expected; send {"mode": "auto" or "required", "tools": [{"type": '
            '"function", "function": {"name": "f"}}]}',
            field="tool_choice",
        )
    by_name = {_name_of(tool): tool for tool in tools or ()}
    names = [_name_of(tool) for tool in chosen]
    if not names:
        raise RequestError("tool_choice allows no tool; name at least one", field="tool_choice")
    for i, name in enumerate(names):
        if name is None or name not in by_name:
            entry = f"tool {i}, {show(chosen[i])} without a name" if name is None else show(name)
            raise RequestError(f"tool_choice allows {entry}, which is none of the tools", field="tool_choice")
    return [by_name[name] for name in dict.fromkeys(names)], mode


def _name_of(tool: Any) -> str | None:
    """Returns the name of a tool in the form of chats, or of responses."""
    inner = next((tool[kind] for kind in KINDS if kind in tool), tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def as_functions(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns tools as chat templates read them: a custom tool is a function, which says the grammar of its input."""
    return [_as_function(tool) for tool in tools] if tools else None


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    custom = tool.get("custom")
    if tool.get("type") != "custom" or not isinstance(custom, dict):
        return tool
    syntax, definition = _grammar_of(custom)
    said = [custom.get("description"), definition and f"The input matches this grammar ({syntax}):\n{definition}"]
    function = {"name": custom.get("name"), "description": "\n".join(each for each in said if isinstance(each, str))}
    return {"type": "function", "function": {**function, "parameters": _text_schema()}}


def _text_schema(pattern: str | None = None) -> dict[str, Any]:
    """Returns the schema of the parameters of a custom tool. pattern: that its whole input matches"""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """Returns the meaning of tools, tool_choice and parallel_tool_calls. Raises RequestError."""
    schemas, inputs = _checked(tools or [])
    use = ToolUse(schemas, "auto" if schemas else "none", parallel=parallel is not False, inputs=inputs)
    if choice is None:
        return use
    if choice in ("none", "auto", "required") and isinstance(choice, str):
        if choice == "required" and not schemas:
            raise RequestError("tool_choice is 'required' but there are no tools; send tools", field="tool_choice")
        known: Any = choice if schemas else "none"
        use = replace(use, choice=known)
    else:
        use = replace(use, choice="named", name=_named(choice, schemas), parallel=False)
    held = next((form for form in inputs.values() if form is not None and form.kind == "grammar"), None)
    if use.choice == "required" and held is not None and use.only_input is None:
        raise RequestError(
            f"tool_choice is 'required', but {held.path} is a grammar, which one of several calls cannot be held to; "
            "name the tool in tool_choice, or send it alone",
            field="tool_choice",
        )
    return use


def _named(given: Any, schemas: dict[str, dict[str, Any]]) -> str:
    name = _name_of(given) if isinstance(given, dict) and any(kind in given for kind in KINDS) else None
    if name is None:
        raise RequestError(
            f"tool_choice is {show(given)}, expected none, auto, required, or an object such as " + EXAMPLE_CHOICE,
            field="tool_choice",
        )
    if name not in schemas:
        raise RequestError(f"tool_choice names {name[:80]!r}, which is none of the tools", field="tool_choice")
    return name


def _checked(tools: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Constraint | None]]:
    """Returns the schema of each tool's parameters, and the form of each custom tool's input, by name."""
    if tools and len(msgspec.json.encode(tools)) > MAX_BYTES:
        raise RequestError(f"tools has more than {MAX_BYTES} bytes as JSON; send less", field="tools")
    schemas: dict[str, dict[str, Any]] = {}
    inputs: dict[str, Constraint | None] = {}
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind not in KINDS:
            raise RequestError(
                f"tools[{i}].type is {show(kind)}, but only functions and custom tools are served; {EXAMPLE}",
                field=f"tools[{i}].type",
            )
        path, inner = f"tools[{i}].{kind}", tool.get(kind)
        if not isinstance(inner, dict):
            raise RequestError(f"{path} is {show(inner)}; {EXAMPLE}", field=path)
        name = inner.get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            raise RequestError(
                f"{path}.name is {show(name)}, expected up to 64 letters, digits, and any of _ - . :",
                field=f"{path}.name",
            )
        if name in schemas:
            raise RequestError(f"{path}.name is {name!r}, as of a tool before it", f"{path}.name")
        if kind == "custom":
            inputs[name] = form = _input_form(path, inner)
            text = _text_schema(form.text if form is not None and form.kind == "regex" else None)
            schemas[name] = with_options(text, LENIENT)  # it has no word to leave out: functions beside it decide
            continue
        parameters = inner.get("parameters")
        if not isinstance(parameters, dict | None):
            raise RequestError(
                f"{path}.parameters is {show(parameters)}, expected a JSON schema", field=f"{path}.parameters"
            )
        schemas[name] = (parameters or {}) if inner.get("strict") else lenient(parameters or {})
    return schemas, inputs


def _input_form(path: str, custom: dict[str, Any]) -> Constraint | None:
    """Returns the form of the input of a custom tool; None: any text. Raises RequestError."""
    given = custom.get("format")
    if given is None or (isinstance(given, dict) and given.get("type") == "text"):
        return None
    syntax, definition = _grammar_of(custom)
    if definition is None or syntax not in _SYNTAXES:
        raise RequestError(f"{path}.format is {show(given)}, expected {_FORMAT}", field=f"{path}.format")
    form = Constraint(_SYNTAXES[syntax], definition, path=f"{path}.format")
    form.validate()
    if form.kind == "regex" and (wrong := _ungrouped(definition)):
        raise RequestError(f"{form.name} is a regular expression with {wrong}; correct it", form.name)
    return form


def _ungrouped(pattern: str) -> str:
    """Returns why a regular expression is another one in a group, where it stands beside other tools; "": it is not."""
    if _VERBOSE.search(pattern):
        return "the flag x, which is not served here"
    depth = in_class = 0
    for token in _TOKENS.findall(pattern):
        if token[0] == "[":
            in_class += 1
        elif in_class:
            in_class -= token == "]"
        elif token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
            if depth < 0:
                return "a ) that closes no group"
    return "a group that is not closed" if depth else ""


def _grammar_of(custom: dict[str, Any]) -> tuple[str, str | None]:
    """Returns syntax and definition of a custom tool's format; no definition where it is no grammar."""
    given = custom.get("format")
    if not isinstance(given, dict) or given.get("type") != "grammar":
        return "", None
    grammar = given.get("grammar", given)  # chats have an object inside, responses do not
    parts = [grammar.get(name) if isinstance(grammar, dict) else None for name in ("syntax", "definition")]
    syntax, definition = (part if isinstance(part, str) else None for part in parts)
    return syntax or "", definition


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose values are objects: arguments always are."""
    kind = schema.get("type", "object")
    is_one_of = isinstance(kind, list) and "object" in kind
    return schema if "$ref" in schema else {**schema, "type": "object" if is_one_of else kind}
