# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Convert typed values to JSON and back: a NamedTuple is an object, a tuple is an array. The types set limits for untrusted JSON: ``Annotated`` with a
Text, a Number, or a tuple of allowed texts.

Hosts evaluate the types of a record with Python 3.9, so a module that defines records uses ``Optional[int]`` and no ``from __future__ import annotations``.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional, TypeVar, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

T = TypeVar("T")
ABSENT = "absent"
Absent = Annotated[Optional[T], ABSENT]
"""Type of a field that JSON omits if it is None. With ``ABSENT`` JSON omits any field that has its default."""
MAX_ENTRIES = 4096
"""Maximum number of entries in a list or a mapping."""
DEFAULT_LIMITS: dict[Any, Any] = {
    **{str: validation.Text(max_length=validation.TEXT_LIMIT), bool: bool, Any: Any},
    int: validation.Number(-validation.MAX_INT),
    float: validation.Number(-validation.MAX_INT, allows_fractions=True),
}
"""Limits of a value whose type has no annotation."""


class Mismatch(Refusal):
    """JSON does not match a type; the message is a clause without a full stop."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path.lstrip('.') or 'it'} {reason}")
        self.reason, self.path = reason, path


class Field(NamedTuple):
    name: str
    type: Any
    """Type hint, including Annotated."""
    is_optional: bool
    """Whether JSON may omit the field or set it to null."""
    omits_default: bool
    default: Any = None


@functools.cache
def fields(record_type: type) -> tuple[Field, ...]:
    """Return the fields of a NamedTuple class in order."""
    hints = typing.get_type_hints(record_type, include_extras=True)
    defaults = record_type._field_defaults  # type: ignore[attr-defined]  # there is no type for NamedTuple classes
    record_fields = []
    for name in record_type._fields:  # type: ignore[attr-defined]  # there is no type for NamedTuple classes
        base, annotations = unwrap(hints[name])
        record_fields.append(
            Field(name, hints[name], is_optional(base) or name in defaults, ABSENT in annotations, defaults.get(name))
        )
    return tuple(record_fields)


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type inside Annotated, and the annotations."""
    annotations: tuple[Any, ...] = ()
    while typing.get_origin(hint) is Annotated:
        annotations += hint.__metadata__
        hint = hint.__origin__
    return hint, annotations


UNION_ORIGINS = (Union, getattr(types, "UnionType", Union))
"""Origins of ``Union[int, None]`` and, in newer Python, ``int | None``."""


def is_optional(base: Any) -> bool:
    return typing.get_origin(base) in UNION_ORIGINS and type(None) in typing.get_args(base)


def inner_hint(base: Any) -> Any:
    """Return the type of the elements of an Optional, a tuple or a mapping."""
    arguments = [argument for argument in typing.get_args(base) if argument is not type(None) and argument is not ...]
    return arguments[-1]


def is_record_type(base: Any) -> bool:
    return isinstance(base, type) and issubclass(base, tuple) and hasattr(base, "_fields")


def specification(record_type: type) -> dict[str, dict[str, Any]]:
    """Return the argument specification for ansible-core."""
    spec = {}
    for field in fields(record_type):
        spec[field.name] = {**_spec_of(field.type), "required": not field.is_optional}
        if field.default is not None:
            spec[field.name]["default"] = dump(field.default)
    return spec


def _spec_of(hint: Any) -> dict[str, Any]:
    base, annotations = unwrap(hint)
    if is_optional(base):
        return _spec_of(inner_hint(base))
    if typing.get_origin(base) is tuple:
        return {"type": "list", "elements": _spec_of(inner_hint(base))["type"]}
    choices = next(({"choices": list(note)} for note in annotations if isinstance(note, tuple)), {})
    type_names = {str: "path" if "path" in annotations else "str", bool: "bool", int: "int", float: "float"}
    return {"type": type_names.get(base, "dict"), **choices}


def parse(record_type: type[T], data: Any) -> T:
    """Return the record that JSON describes; ignore unknown fields.

    :raises Mismatch: the data does not match the type.
    """
    hint: Any = record_type
    return typing.cast(T, _make_reader(hint)(data))


def read_file(record_type: type[T], path: Path, max_bytes: int) -> T | None:
    """Return the record in a JSON file of at most ``max_bytes``; None if the file is missing or invalid."""
    try:
        return parse(record_type, reading.read_object(path, max_bytes))
    except (OSError, ValueError):
        return None


def parse_report(host: str, subject: str, record_type: type[T], data: Any) -> T:
    """Return a host's report as a record that is safe to print.

    :param subject: subject of the report, like 'the server'.
    :raises Refusal: the report does not match the type.
    """
    try:
        return parse(record_type, data)
    except Mismatch as error:
        raise refusal_of_report(host, subject, error) from None


def refusal_of_report(host: str, subject: str, reason: object) -> Refusal:
    """Return the refusal of a host's report that does not match its type for ``reason``."""
    return Refusal(
        f"The report from {host} about {subject} does not match this version's format ({reason}): run the playbook again. If it still does not match, "
        "treat this host as compromised (docs/security.md)."
    )


@functools.cache
def _make_reader(hint: Any) -> Callable[[Any], Any]:
    """Return the function that converts JSON to this type."""
    base, annotations = unwrap(hint)
    limits = next((note for note in annotations if isinstance(note, (validation.Text, validation.Number, tuple))), None)
    origin, arguments = typing.get_origin(base), typing.get_args(base)
    if is_record_type(base):
        return _make_record_reader(base)
    if is_optional(base):
        reader = _make_reader(Annotated[inner_hint(base), limits] if limits else inner_hint(base))
        return lambda data: None if data is None else reader(data)
    if origin in UNION_ORIGINS:
        read_scalar, read_array = map(_make_reader, arguments)
        return lambda data: (read_array if isinstance(data, (list, tuple)) else read_scalar)(data)
    if origin is tuple:
        reader = _make_reader(inner_hint(base))
        return lambda data: tuple(
            _read_at(f"[{index}]", reader, value) for index, value in enumerate(_check_size(data, (list, tuple)))
        )
    if origin in (dict, Mapping):
        read_name, read_value = map(_make_reader, arguments)
        return lambda data: {
            _read_at("", read_name, name): _read_at(f".{name}", read_value, value)
            for name, value in _check_size(data, Mapping).items()
        }
    return functools.partial(_check_value, arguments if origin is typing.Literal else limits or DEFAULT_LIMITS[base])


def _make_record_reader(record_type: Any) -> Callable[[Any], Any]:
    readers = [(field, _make_reader(field.type), is_optional(unwrap(field.type)[0])) for field in fields(record_type)]

    def read_record(data: Any) -> Any:
        values = []
        for field, reader, is_nullable in readers:
            value = _check_size(data, Mapping).get(field.name)
            if value is None and field.is_optional and not (is_nullable and field.name in data):
                values.append(field.default)
            elif field.name not in data:
                raise Mismatch("is missing", f".{field.name}")
            else:
                values.append(_read_at(f".{field.name}", reader, value))
        return record_type(*values)

    return read_record


def _read_at(path: str, reader: Callable[[Any], Any], data: Any) -> Any:
    try:
        return reader(data)
    except Mismatch as error:
        raise Mismatch(error.reason, path + error.path) from None


def _check_size(data: Any, expected_type: Any) -> Any:
    """Return a list or a mapping of the right type and size."""
    if not isinstance(data, expected_type):
        raise Mismatch(f"is {validation.quote(data)}")
    if len(data) > MAX_ENTRIES:
        raise Mismatch(f"has {len(data)} entries, more than {MAX_ENTRIES}")
    return data


def _check_value(limits: Any, data: Any) -> Any:
    if not _is_within(data, limits):
        raise Mismatch(f"is {validation.quote(data)}")
    return data


def _is_within(value: Any, limits: Any) -> bool:
    if limits is Any:
        return True
    if limits is bool:
        return isinstance(value, bool)
    if isinstance(limits, validation.Number):
        classes = (int, float) if limits.allows_fractions else (int,)
        return isinstance(value, classes) and not isinstance(value, bool) and limits.minimum <= value <= limits.maximum
    if not isinstance(limits, validation.Text):
        return isinstance(value, (str, bool)) and value in limits
    if not isinstance(value, str) or len(value) > limits.max_length or not re.fullmatch(limits.expression, value):
        return False
    return limits.expression.startswith("(?s)") or validation.is_plain(value)


def dump(value: Any) -> Any:
    """Return a record, or a collection of records, as JSON."""
    if is_record_type(type(value)):
        record_type: Any = type(value)
        return {
            field.name: dump(element)
            for field, element in zip(fields(record_type), value)
            if not field.omits_default or element != field.default
        }
    if isinstance(value, (tuple, list)):
        return [dump(element) for element in value]
    if isinstance(value, Mapping):
        return {name: dump(element) for name, element in value.items()}
    return value
