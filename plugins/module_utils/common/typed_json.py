# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values with types as JSON and back: a NamedTuple is an object, a tuple an array. The types hold the limits that untrusted JSON is checked against:
``Annotated`` with a Text, a Number, or a tuple of the texts that may be.

Hosts evaluate the types of a record with Python 3.9, so a module that defines one writes ``Optional[int]``, and has no ``from __future__ import annotations``.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Optional, TypeVar, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import (
    Each,
    Maybe,
    Number,
    Problem,
    Text,
    mismatch,
)

T = TypeVar("T")
ABSENT = "absent"
Absent = Annotated[Optional[T], ABSENT]
"""Type of a field that JSON leaves out where it is None. With ``ABSENT`` any other field is left out where it has its default."""
LINE = Text(longest=4096)
"""Of a text about which its type says nothing else."""


class Field(NamedTuple):
    """A field of a record."""

    name: str
    type: Any
    """As ``typing`` has it, Annotated included."""
    optional: bool
    """Whether JSON may leave it out, or have null in its place."""
    absent: bool
    """Whether JSON leaves it out where it has its default."""
    default: Any = None


@functools.cache
def fields(record: type) -> tuple[Field, ...]:
    """The fields of a NamedTuple class, in their order."""
    hints = typing.get_type_hints(record, include_extras=True)
    defaults = record._field_defaults  # type: ignore[attr-defined]  # no type says «a class of NamedTuple»
    found = []
    for name in record._fields:  # type: ignore[attr-defined]  # the same
        bare, notes = unwrap(hints[name])
        found.append(
            Field(name, hints[name], is_optional(bare) or name in defaults, ABSENT in notes, defaults.get(name))
        )
    return tuple(found)


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without Annotated, and its annotations, the outermost first."""
    notes: tuple[Any, ...] = ()
    while typing.get_origin(hint) is Annotated:
        notes += hint.__metadata__
        hint = hint.__origin__
    return hint, notes


UNIONS = (Union, getattr(types, "UnionType", Union))
"""``Union[int, None]``, and ``int | None`` where Python has that."""


def is_optional(bare: Any) -> bool:
    return typing.get_origin(bare) in UNIONS and type(None) in typing.get_args(bare)


def inner(bare: Any) -> Any:
    """The type of what an Optional, a tuple or a mapping holds."""
    arguments = [argument for argument in typing.get_args(bare) if argument is not type(None) and argument is not ...]
    return arguments[-1]


def is_record(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, tuple) and hasattr(bare, "_fields")


def specification(record: type) -> dict[str, dict[str, Any]]:
    """What ansible-core has to know of arguments to read them: each field of a NamedTuple is one."""
    spec = {}
    for field in fields(record):
        spec[field.name] = {**_type_of(field.type), "required": not field.optional}
        if field.default is not None:
            spec[field.name]["default"] = dump(field.default)
    return spec


def _type_of(hint: Any) -> dict[str, Any]:
    bare, notes = unwrap(hint)
    if is_optional(bare):
        return _type_of(inner(bare))
    if typing.get_origin(bare) is tuple:
        return {"type": "list", "elements": _type_of(inner(bare))["type"]}
    choices = next(({"choices": list(note)} for note in notes if isinstance(note, tuple)), {})
    names = {str: "path" if "path" in notes else "str", bool: "bool", int: "int", float: "float"}
    return {"type": names.get(bare, "dict"), **choices}


def parse(record: type[T], data: Mapping[str, Any]) -> T:
    """The record that JSON describes. Further names are left out.

    :param data: of this form: whoever does not know that asks ``problem`` first.
    :raises KeyError: a field is missing.
    """
    hint: Any = record
    return typing.cast(T, _reader(hint)(data))


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Makes a value of this type from JSON."""
    bare, _notes = unwrap(hint)
    if is_record(bare):
        readers = [(field, _reader(field.type), is_optional(unwrap(field.type)[0])) for field in fields(bare)]

        def read(data: Any) -> Any:
            return bare(
                *(
                    field.default
                    if field.optional and data.get(field.name) is None and not (nullable and field.name in data)
                    else reader(data[field.name])
                    for field, reader, nullable in readers
                )
            )

        return read
    origin = typing.get_origin(bare)
    if is_optional(bare):
        some = _reader(inner(bare))
        return lambda data: None if data is None else some(data)
    if origin is tuple:
        entry = _reader(inner(bare))
        return lambda data: tuple(entry(part) for part in data)
    if origin in (dict, Mapping):
        value = _reader(inner(bare))
        return lambda data: {name: value(part) for name, part in data.items()}
    return lambda data: data


def dump(value: Any) -> Any:
    """A record, or whatever holds some, as JSON."""
    if is_record(type(value)):
        record: Any = type(value)
        return {
            field.name: dump(part)
            for field, part in zip(fields(record), value)
            if not field.absent or part != field.default
        }
    if isinstance(value, (tuple, list)):
        return [dump(part) for part in value]
    if isinstance(value, Mapping):
        return {name: dump(part) for name, part in value.items()}
    return value


def problem(where: str, data: Any, record: type) -> Problem | None:
    """The first part of JSON that a record cannot be made of; None where there is none."""
    return mismatch(where, data, shape(record))


@functools.cache
def shape(hint: Any) -> Any:
    """What ``validation.mismatch`` compares JSON of this type with."""
    bare, notes = unwrap(hint)
    limits = next((note for note in notes if isinstance(note, (Text, Number, tuple))), None)
    origin = typing.get_origin(bare)
    if is_record(bare):
        return {field.name: _field_shape(field) for field in fields(bare)}
    if is_optional(bare):
        return Maybe(limits or shape(inner(bare)))
    if origin is tuple:
        return [shape(inner(bare))]
    if origin in (dict, Mapping):
        return Each(shape(inner(bare)))
    if origin is typing.Literal:
        return typing.get_args(bare)
    return bool if bare is bool else limits or _SHAPES[bare]


_SHAPES: dict[Any, Any] = {str: LINE, int: Number(), float: Number(real=True), bool: bool, Any: Any}


def _field_shape(field: Field) -> Any:
    found = shape(field.type)
    return Maybe(found) if field.optional and not isinstance(found, Maybe) else found
