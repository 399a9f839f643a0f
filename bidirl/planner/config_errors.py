"""Turn what a section's model refuses into one line per value: place, value, rule, remedy."""

from collections.abc import Callable, Container, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bidirl.planner.config_file import ConfigFile, dotted, nearest
from bidirl.planner.toml_lines import KeyPath

__all__ = ["section_problems"]

RULES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "must be an integer; write it without quotes, point or true/false",
    "int_from_float": lambda _: "must be an integer; write it without a point",
    "float_type": lambda _: "must be a number; write it without quotes",
    "decimal_type": lambda _: "must be a number; write it without quotes",
    "decimal_parsing": lambda _: "must be a number; write it without quotes",
    "bool_type": lambda _: "must be true or false; write it without quotes",
    "string_type": lambda _: "must be a text; put it in quotes",
    "finite_number": lambda _: "must be finite; give a number",
    "model_type": lambda _: "must be a table; write { key = value }",
    "model_attributes_type": lambda _: "must be a table; write { key = value }",
    "dict_type": lambda _: "must be a table; write { key = value }",
    "list_type": lambda _: "must be an array; write [ ... ]",
    "tuple_type": lambda _: "must be an array; write [ ... ]",
    "greater_than_equal": lambda ctx: f"must be at least {_plain(ctx['ge'])}; raise it",
    "greater_than": lambda ctx: f"must be above {_plain(ctx['gt'])}; raise it",
    "less_than_equal": lambda ctx: f"must be at most {_plain(ctx['le'])}; lower it",
    "less_than": lambda ctx: f"must be below {_plain(ctx['lt'])}; lower it",
    "decimal_max_places": lambda ctx: f"has more than {ctx['decimal_places']} decimal places; round it",
    "value_error": lambda ctx: str(ctx["error"]),
}
"""pydantic's error type -> rule and remedy."""


def _plain(bound: Any) -> str:
    return str(bound).removesuffix(".0")


def section_problems(
    file: ConfigFile,
    section: str,
    model: type[BaseModel],
    error: ValidationError,
    settled: Container[KeyPath] = (),
) -> list[str]:
    """Return one line per refused value of a section; values at ``settled`` paths have theirs already."""
    lines: dict[str, None] = {}
    for details in error.errors(include_url=False):
        path, value, rest = _locate(file.data, (section, *details["loc"]))
        if path not in settled:
            lines[_line(file, model, details, path, value, rest)] = None
    return list(lines)


def _line(
    file: ConfigFile,
    model: type[BaseModel],
    details: ErrorDetails,
    path: KeyPath,
    value: Any,
    rest: KeyPath,
) -> str:
    match details["type"]:
        case "missing":
            key = (*path, *rest[-1:])
            return f"{file.where(path)}: {dotted(key)} is missing: it is required; add it to {_table(path)}"
        case "extra_forbidden":
            known = sorted(model.model_fields) if len(path) == 2 else _all_keys(model)
            meant = nearest(str(path[-1]), known)
            remedy = f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
            return file.problem(path, value, f"unknown key; {remedy}")
        case "enum" | "literal_error":
            return file.problem(path, value, _choice_rule(value, str(details.get("ctx", {})["expected"])))
        case kind if kind in RULES:
            rule = RULES[kind](details.get("ctx", {}))
        case _:
            message = details["msg"]
            rule = f"{message[:1].lower()}{message[1:]}; correct it"
    if details["type"] == "value_error" and isinstance(value, dict):
        return file.table_problem(path, rule)
    return file.problem(path, value, rule)


def _locate(data: Mapping[str, Any], loc: tuple[str | int, ...]) -> tuple[KeyPath, Any, KeyPath]:
    """Return the written path that an error's location stands for, its value, and what is left over.

    A location also names branches of unions, which nobody wrote; what the data does not hold is left out.
    """
    node: Any = data
    path: KeyPath = ()
    rest: KeyPath = ()
    for part in loc:
        inside = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if inside:
            node = node[part]
            path, rest = (*path, part), ()
        else:
            rest = (*rest, part)
    return path, node, rest


def _table(path: KeyPath) -> str:
    return f"[{path[0]}]" if len(path) == 1 else dotted(path)


def _choice_rule(value: Any, expected: str) -> str:
    choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
    meant = nearest(value, choices) if isinstance(value, str) else None
    remedy = f"did you mean {meant}?" if meant else "choose one of them"
    return f"must be one of {', '.join(choices)}; {remedy}"


def _all_keys(model: type[BaseModel]) -> list[str]:
    """Return every key of the tables inside a section; a tag of a union hides which table was meant."""
    schema = model.model_json_schema()
    return sorted({key for table in schema.get("$defs", {}).values() for key in table.get("properties", {})})
