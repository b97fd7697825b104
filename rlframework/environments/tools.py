"""Make the public methods of a plain object tools: their JSON schemas from type annotations, and checked calls.

A tool is a public method with a docstring and an annotation for each parameter. The docstring is the description that
the model reads; a section `Args:` in it, with lines `name: text`, describes the parameters, and so does
`Annotated[int, Field(description="...")]`. Annotations may be anything that pydantic validates: numbers, literals,
lists, dataclasses, models. Arguments are validated strictly: the text "3" is not an integer.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import to_json
from typing_extensions import Annotated, NotRequired, TypedDict, get_type_hints  # noqa: UP035 - pydantic asks for it

from rlframework.base.errors import ConfigError
from rlframework.environments import threads
from rlframework.environments.tool_episodes import RejectedCall, answer, object_of, refusal, require_known, spec
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec

_LOG = logging.getLogger(__name__)

MAX_RESULT_CHARACTERS = 4000
"""The default limit of a tool's result, in characters."""

RESERVED = ("reward", "close")
"""Public methods that are not tools: the reward of the final answer, and the end of an episode."""

_ARGS = re.compile(r"^Args:[ \t]*\n((?:[ \t]+.*\n?|[ \t]*\n)+)", re.MULTILINE)
_SECTION = re.compile(r"^(?:Returns|Raises|Yields|Examples?):[ \t]*\n(?:[ \t]+.*\n?|[ \t]*\n)*", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.*)$")


@dataclass(frozen=True, eq=False)
class Tool:
    """One method as a tool: its name, its description for the model, and the reader of its arguments."""

    name: str
    spec: ToolSpec
    arguments: TypeAdapter[dict[str, Any]]


class Toolbox:
    """The tools of a class. Made once per class, since building schemas takes milliseconds.

    `limit`: the most characters of a result that the model sees.
    """

    def __init__(self, owner: type, *, limit: int = MAX_RESULT_CHARACTERS) -> None:
        """Raises `ConfigError` for a class without tools, and for a method that cannot be described to a model."""
        self._place = f"{owner.__module__}:{owner.__qualname__}"
        self._limit = limit
        self._logged: set[str] = set()
        methods = {name: method for name, method in _public_methods(owner).items() if name not in RESERVED}
        if not methods:
            raise ConfigError(f"{self._place} has no tools; write a public method with annotations and a docstring")
        self._tools = {name: _tool(name, method, f"{self._place}.{name}") for name, method in methods.items()}

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as chat templates and OpenAI's API describe them, in the order of their definition."""
        return tuple(tool.spec for tool in self._tools.values())

    async def call(self, holder: object, call: ToolCall) -> Message:
        """Call a method of `holder` as the model asks, and return the tool message with its result.

        Synchronous methods run in a thread. A result that is not text is JSON. A call that cannot be made or raises
        gives a message that begins with "error: "; the traceback of an exception is logged once per line of code.
        """
        name = call["function"]["name"]
        try:
            require_known(name, self._tools)
            arguments = _validated(self._tools[name], call)
            result = await threads.call(getattr(holder, name), **arguments)
            return answer(call, _text(result), self._limit)
        except RejectedCall as error:
            return refusal(call, error, self._limit)
        except Exception as error:  # noqa: BLE001 - the tool is the user's, its failure the model's observation
            self.log(name, error)
            return refusal(call, f"{type(error).__name__}: {error}", self._limit)

    def log(self, name: str, error: Exception) -> None:
        """Log that the method `name` raised, with the traceback, once per line of code."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{name} {type(error).__name__} {frame.filename}:{frame.lineno}"
        if cause not in self._logged:
            self._logged.add(cause)
            _LOG.warning("%s.%s raised:", self._place, name, exc_info=error)


def tools_of(holder: object) -> tuple[ToolSpec, ...]:
    """Return the public methods of `holder`, an object or a class, as tools; see `Toolbox` for errors."""
    return Toolbox(holder if isinstance(holder, type) else type(holder)).specs


async def call(holder: object, call: ToolCall) -> Message:
    """Call a method of `holder` as a tool; see `Toolbox.call`, which saves building the schemas at each call."""
    return await Toolbox(type(holder)).call(holder, call)


def _public_methods(owner: type) -> dict[str, Callable[..., Any]]:
    """The public methods of `owner` and its bases, those of bases first; an override keeps the place of the first."""
    found: dict[str, Callable[..., Any]] = {}
    for kind in reversed(owner.__mro__[:-1]):
        for name, value in vars(kind).items():
            if inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod)):
                found[name] = getattr(owner, name)
            else:
                found.pop(name, None)  # an attribute that hides the method of a base
    return {name: method for name, method in found.items() if not name.startswith("_")}


def _tool(name: str, method: Callable[..., Any], place: str) -> Tool:
    described, texts = _described(inspect.getdoc(method) or "")
    if not described:
        raise ConfigError(f"the tool {place} has no docstring; write one, which the model reads as its description")
    try:
        adapter = _arguments(name, method, texts, place)
        schema = adapter.json_schema(schema_generator=_Schema)
    except (NameError, PydanticUserError, PydanticUndefinedAnnotation, PydanticSchemaGenerationError) as error:
        raise ConfigError(f"the tool {place} has an annotation that is not a JSON type: {error}") from error
    schema.pop("title", None)
    return Tool(name, spec(name, described, {"properties": {}, **schema}), adapter)


def _arguments(
    name: str, method: Callable[..., Any], texts: Mapping[str, str], place: str
) -> TypeAdapter[dict[str, Any]]:
    """A validator of the arguments of `method`, as a typed dictionary that allows no further keys."""
    typed_dict: Any = TypedDict  # both made of values, which type checkers do not follow
    annotated: Any = Annotated
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in _parameters(method):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"the tool {place} has the parameter {parameter}; a tool takes named parameters only")
        if parameter.name not in hints:
            raise ConfigError(f"the tool {place}: parameter {parameter.name!r} has no annotation; write one")
        kind = annotated[hints[parameter.name], _field(parameter, texts.get(parameter.name))]
        fields[parameter.name] = kind if parameter.default is parameter.empty else NotRequired[kind]
    kind = typed_dict(name, fields)
    kind.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(kind)


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of `method`, got from the class, without `self`."""
    parameters = list(inspect.signature(method).parameters.values())
    bound = inspect.ismethod(method)  # a classmethod
    static = not bound and "." in method.__qualname__ and not (parameters and parameters[0].name == "self")
    return parameters if bound or static else parameters[1:]


def _field(parameter: inspect.Parameter, text: str | None) -> FieldInfo:
    default = parameter.default
    shown = default is not parameter.empty and isinstance(default, (str, int, float, bool))
    extra: Any = {"default": default} if shown else None
    field: FieldInfo = Field(description=text, json_schema_extra=extra)
    return field


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the description, and the descriptions of the parameters in its section `Args:`."""
    texts: dict[str, str] = {}
    section = _ARGS.search(docstring)
    name = ""
    for line in inspect.cleandoc(section[1]).splitlines() if section else ():
        if found := _ARGUMENT.match(line):
            name, texts[found[1]] = found[1], found[2]
        elif name and line.strip():
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return _SECTION.sub("", _ARGS.sub("", docstring)).strip(), texts


def _validated(tool: Tool, call: ToolCall) -> dict[str, Any]:
    """The arguments of `call`, of the types that the method asks for. Raises `RejectedCall`."""
    found = object_of(call)  # first, for its messages about what is not a JSON object
    try:
        return tool.arguments.validate_json(to_json(found), strict=True)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise RejectedCall(f"wrong arguments of {tool.name!r}: {'; '.join(problems[:5])}") from error
    except ValueError as error:
        raise RejectedCall(f"the arguments of {tool.name!r} cannot be read: {error}") from error


def _text(result: Any) -> str:
    return result if isinstance(result, str) else to_json(result).decode()


class _Schema(GenerateJsonSchema):
    """JSON schemas without titles, which repeat the names and cost the model tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        return _untitled(super().typed_dict_schema(schema))

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _untitled(super().model_schema(schema))


def _untitled(schema: JsonSchemaValue) -> JsonSchemaValue:
    schema.pop("title", None)
    return schema
