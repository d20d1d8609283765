"""TOML files <-> frozen dataclasses, with errors that name the file, the table and the key."""

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.files import write_whole

T = TypeVar("T")


def read_toml(cls: type[T], path: Path) -> T:
    """Read the dataclass `cls` from `path`."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    return parse_toml(cls, text, name=path.name)


def parse_toml(cls: type[T], text: str, *, name: str) -> T:
    """Read the dataclass `cls` from TOML `text`; `name` stands for the file in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}.") from None
    return _build(cls, table, where=name)


def write_toml(path: Path, value: Any) -> None:
    """Write a dataclass (or a plain dict) to `path`; fields that are None are left out."""
    write_whole(path, format_toml(value))


def format_toml(value: Any) -> str:
    """Return a dataclass (or a plain dict) as TOML; fields that are None are left out."""
    import tomli_w  # only writers need it

    table = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return tomli_w.dumps(_without_none(table))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def _build(cls: type[T], table: dict[str, Any], *, where: str) -> T:
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in {where}.{did_you_mean(key, known)}")
    values = {key: _convert(item, hints[key], key=key, where=where) for key, item in table.items()}
    required = [f.name for f in dataclasses.fields(cls) if _is_required(f)]  # type: ignore[arg-type]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{where} lacks the key {missing[0]!r}.")
    return cls(**values)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(value: Any, hint: Any, *, key: str, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # only "X | None": None itself is a key left out
        return _convert(value, next(a for a in arguments if a is not type(None)), key=key, where=where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, where=f"{where} [{key}]")  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, arguments[0], key=key, where=where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {name: _convert(item, arguments[1], key=f"{key}.{name}", where=where) for name, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_instance = isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if is_instance or (origin is typing.Literal and value in arguments):
        return value
    if origin is typing.Literal:
        raise ConfigError(f"{key!r} in {where} must be one of {', '.join(map(repr, arguments))}, not {value!r}.")
    expected = "table" if dataclasses.is_dataclass(hint) else _NAMES.get(origin or hint, str(hint))
    raise ConfigError(f"{key!r} in {where} must be a {expected}, not {value!r}.")


_NAMES = {int: "whole number", float: "number", str: "string", bool: "true or false", tuple: "list", dict: "table"}
