"""What an export says, and how the configuration of each framework is written down."""

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, assert_never

from bidirl.errors import InputError

__all__ = ["Recipe", "Syntax", "Value", "render"]

Value = bool | int | float | Decimal | str | None
COMMENT_CHARACTERS = 108
"""Width of a comment line, with room for its mark on a screen of 110."""


class Syntax(StrEnum):
    """How a framework takes its options."""

    HYDRA = "hydra"
    """``key=value`` overrides of a command."""
    FLAGS = "flags"
    """``--key value`` of a command; a flag without a value is written as true."""
    YAML = "yaml"
    TOML = "toml"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options of one framework for one plan, and what they do not carry over."""

    framework: str
    syntax: Syntax
    command: str
    """The program that takes the options; for a file format, how it is read."""
    settings: Mapping[str, Value]
    notes: tuple[str, ...]
    """What was rounded, what differs, what cannot be expressed: one sentence each."""


def render(recipe: Recipe, head: Iterable[str]) -> str:
    """Return the text to paste: comments first, then the options in the framework's own syntax.

    Raises:
        InputError: a value cannot be written in that syntax.
    """
    lines = [line for text in (*head, *recipe.notes) for line in _comment(text)]
    match recipe.syntax:
        case Syntax.HYDRA:
            lines += _command(recipe.command, [f"{k}={_hydra(v)}" for k, v in recipe.settings.items()])
        case Syntax.FLAGS:
            lines += _command(recipe.command, [_flag(k, v) for k, v in recipe.settings.items()])
        case Syntax.YAML:
            lines += [*_comment(recipe.command), *_yaml(_nested(recipe.settings), "")]
        case Syntax.TOML:
            lines += [*_comment(recipe.command), *_toml(_nested(recipe.settings), ())]
        case _:
            assert_never(recipe.syntax)
    return "\n".join(lines).rstrip("\n") + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COMMENT_CHARACTERS,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _command(command: str, options: list[str]) -> list[str]:
    lines = [command, *(f"    {option}" for option in options)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _number(value: Decimal | float) -> str:
    text = format(value, "f") if isinstance(value, Decimal) else repr(value)
    return text if "." in text or "e" in text else f"{text}.0"


def _hydra(value: Value) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case Decimal() | float():
            return _number(value)
        case int():
            return str(value)
        case str():
            if not all(letter.isalnum() or letter in "_.-/" for letter in value):
                raise InputError(f"{value!r} needs quotes in a shell: use plain letters, digits and _ . - /")
            return value


def _flag(key: str, value: Value) -> str:
    return key if value is True else f"{key} {_hydra(value)}"


def _nested(settings: Mapping[str, Value]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _scalar(value: Value) -> str:
    """Return a value as JSON writes it, which YAML and TOML read too."""
    return _number(value) if isinstance(value, Decimal | float) else json.dumps(value)


def _yaml(tree: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _toml(tree: Mapping[str, Any], place: tuple[str, ...]) -> Iterable[str]:
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    if plain and place:
        yield f"[{'.'.join(place)}]"
    for key, value in plain.items():
        if value is None:
            raise InputError(f"{'.'.join((*place, key))} = null cannot be written in TOML: leave it out")
        yield f"{key} = {_scalar(value)}"
    if plain:
        yield ""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _toml(value, (*place, key))
