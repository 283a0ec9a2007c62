"""Records: frozen dataclasses as JSON. Reading one names all its problems at once."""

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

_JSON_NAMES: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple: "a list",
}


def record_to_json(record: Any) -> dict[str, Any]:
    """Turn a dataclass into JSON values; `read_record` reads them back."""
    return {entry.name: _to_json(getattr(record, entry.name)) for entry in fields(record)}


def read_record[T](
    cls: type[T],
    data: Mapping[str, Any],
    problems: list[str],
    *,
    allow_unknown: bool,
    prefix: str = "",
) -> T | None:
    """Build a dataclass from JSON values, by its annotations; None if there is a problem.

    A field may be a string, number, boolean, dataclass, or a tuple or dict of one of these, and
    each of these may also be None.

    Args:
        cls: the dataclass.
        data: the JSON object.
        problems: gets a text for every field that is missing, unknown or of a wrong type.
        allow_unknown: ignore unknown fields, at any depth.
        prefix: put before the names of fields in `problems`.
    """
    found = len(problems)
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for entry in fields(cls):  # type: ignore[arg-type]  # only called on dataclasses
        if entry.name in data:
            values[entry.name] = _read_value(
                hints[entry.name], data[entry.name], prefix + entry.name, problems, allow_unknown
            )
        elif entry.default is MISSING and entry.default_factory is MISSING:
            problems.append(f"field {prefix}{entry.name} is missing")
    if not allow_unknown:
        for name in sorted(set(data) - set(hints)):
            close = difflib.get_close_matches(name, hints, n=1)
            hint = f" (close to {prefix}{close[0]})" if close else ""
            problems.append(f"field {prefix}{name} is unknown{hint}")
    return None if len(problems) > found else cls(**values)


def _read_value(hint: Any, value: Any, name: str, problems: list[str], allow_unknown: bool) -> Any:
    """Read one field by its annotation; a wrong type is a problem and gives None."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        if value is None:
            return None
        (hint,) = (option for option in get_args(hint) if option is not type(None))
        return _read_value(hint, value, name, problems, allow_unknown)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return read_record(hint, value, problems, allow_unknown=allow_unknown, prefix=f"{name}.")
    if origin is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        return tuple(
            _read_value(item, entry, f"{name}[{i}]", problems, allow_unknown)
            for i, entry in enumerate(value)
        )
    if origin is dict and isinstance(value, Mapping):
        item = get_args(hint)[1]
        return {
            key: _read_value(item, entry, f"{name}.{key}", problems, allow_unknown)
            for key, entry in value.items()
        }
    # By exact type: true is not an integer in JSON, but Python's bool is an int.
    if type(value) is not hint:
        expected = _JSON_NAMES.get(origin or hint, "an object")
        problems.append(f"field {name} is {value!r}, not {expected}")
        return None
    return value


def _to_json(value: Any) -> Any:
    if is_dataclass(value):
        return record_to_json(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
