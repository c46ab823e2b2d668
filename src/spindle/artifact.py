"""Values on disk.

Every value that passes between packages is a frozen dataclass of numbers, strings, tuples and other such dataclasses.
This module writes any of them as JSON and reads them back, checking types and naming the field that is wrong. Files
are written completely or not at all. It knows no particular class.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import stat
import tempfile
import types
import typing
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from spindle.errors import InputError, SpindleError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """The JSON form of a value; fields with their default value are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init and getattr(value, field.name) != field.default
        }
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def json_text(value: Any, known: dict[int, str] | None = None) -> str:
    """`json.dumps(to_json(value), sort_keys=True)`, where objects that a value has many times are written once. `known`
    has the texts of its objects so far, by identity."""
    known = {} if known is None else known
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is int:
        return repr(value)
    text = known.get(id(value))
    if text is None:
        if dataclasses.is_dataclass(kind):
            entries = [
                f'"{name}": {json_text(item, known)}'
                for name, default in _written_fields(kind)
                if (item := getattr(value, name)) != default
            ]
            text = f"{{{', '.join(entries)}}}"
        elif kind is tuple or kind is list:
            text = f"[{', '.join([json_text(item, known) for item in value])}]"
        else:
            text = json.dumps(to_json(value), sort_keys=True)
        known[id(value)] = text
    return text


@functools.cache
def _written_fields(kind: type) -> list[tuple[str, Any]]:
    """The fields of a dataclass that JSON has, sorted by name, and their default values."""
    fields = [(field.name, field.default) for field in dataclasses.fields(kind) if field.init]
    return sorted(fields, key=itemgetter(0))


def from_json(kind: type[T], data: Any, where: str) -> T:
    """Read `data` as a `kind`; `where` begins the error message if it is not one."""
    try:
        return typing.cast(T, _read(kind, data, where))
    except InputError:
        raise
    except SpindleError as error:
        raise InputError(f"{where}: {error}") from error


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
        if field.init  # derived fields are not written
    )


def _read(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _read(inner, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise InputError(f"{where}: expected a list, got {shown(data)}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
        if len(data) != len(arguments):
            raise InputError(f"{where}: expected {len(arguments)} entries, got {len(data)}")
        return tuple(
            _read(argument, item, f"{where}[{index}]")
            for index, (argument, item) in enumerate(zip(arguments, data, strict=True))
        )
    if kind is typing.Any:
        return data
    if kind is float:
        return read_number(data, where)
    if kind is int:
        return read_integer(data, where)
    kind = dict if origin is dict else kind
    if not isinstance(data, kind):
        raise InputError(f"{where}: expected {_NAMES.get(kind, kind.__name__)}, got {shown(data)}")
    if kind is dict and arguments and arguments[1] is not typing.Any:
        return {key: _read(arguments[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    return data


def _read_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected an object with the fields of a {kind.__name__}, got {shown(data)}")
    fields = _fields(kind)
    known = [name for name, _, _ in fields]
    for key in data:
        if key not in known:
            raise InputError(f"{where}: unknown field {key!r}; a {kind.__name__} has {', '.join(known)}")
    values = {}
    for name, hint, required in fields:
        if name in data:
            values[name] = _read(hint, data[name], f"{where}.{name}")
        elif required:
            raise InputError(f"{where}: the field {name!r} is missing")
    try:
        return kind(**values)
    except SpindleError as error:
        raise InputError(f"{where}: {error}") from error


_NAMES = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}


def shown(data: Any) -> str:
    """A value for an error message: its JSON, truncated if it is long."""
    text = json.dumps(data, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def read_number(data: Any, where: str) -> float:
    """A finite number; JSON's NaN and Infinity, which Python accepts, are refused."""
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        raise InputError(f"{where}: expected a number, got {shown(data)}")
    try:
        number = float(data)
    except OverflowError as error:
        raise InputError(f"{where}: expected a finite number, got one of {len(str(data))} digits") from error
    if not math.isfinite(number):
        raise InputError(f"{where}: expected a finite number, got {data}")
    return number


def read_integer(data: Any, where: str) -> int:
    """An integer that fits in 64 bits: counts also go into numpy arrays and floats."""
    if isinstance(data, bool) or not isinstance(data, int):
        raise InputError(f"{where}: expected a whole number, got {shown(data)}")
    if not -(1 << 63) <= data < 1 << 63:
        raise InputError(f"{where}: expected a whole number of 64 bits, got one of {len(str(abs(data)))} digits")
    return data


def read_text_file(path: Path) -> str:
    """Read a text file. Raises an InputError with one sentence if that fails."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a directory; give the name of a file") from error
    except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or a zero in the name
        raise InputError(f"{path}: cannot be read as text ({error})") from error


def read_bytes_file(path: Path) -> bytes:
    """Read a file. Raises an InputError with one sentence if that fails."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a directory; give the name of a file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


def read_json_file(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises an InputError with one sentence if that fails."""
    text = read_text_file(path)
    if not text.strip():
        raise InputError(f"{path}: is empty")
    try:
        data = json_value(text)
    except json.JSONDecodeError as error:
        hint = "; is the file truncated?" if error.pos >= len(text.rstrip()) - 1 else ""
        raise InputError(f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}){hint}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON that can be read ({error})") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, got {shown(data)}")
    return data


def json_value(text: str) -> Any:
    """The value of a JSON text; refuses objects in which a key appears twice."""
    return json.loads(text, object_pairs_hook=_object_without_repeats)


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"the key {key!r} appears twice in one object")
        result[key] = value
    return result


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all: to a temporary file first, which is then renamed to the target.

    A symbolic link stays one, and an existing file keeps its mode.
    """
    target = writable_target(path)
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".part")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the host may leave the new name with no content
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def writable_target(path: Path) -> Path:
    """The file that `path` refers to, after symbolic links. Raises an InputError if it cannot be written.

    Anything but a regular file is refused: renaming onto a device or a pipe would replace it.
    """
    try:
        mode = path.stat().st_mode  # of `path`, not of its real path: a pipe behind /dev/stdout has no name
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"{path}: cannot be written, it is a directory; give the name of a file")
    if mode is not None and not stat.S_ISREG(mode):
        raise InputError(f"{path}: cannot be written, it is not a regular file but {_special(mode)}")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise InputError(f"{path}: cannot be written, there is no directory {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written, {target.parent} does not allow it")
    if mode is not None and not os.access(target, os.W_OK):
        raise InputError(f"{path}: cannot be written, the file is read-only")
    return target


def _special(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def write_artifact(path: Path, kind: str, value: Any) -> None:
    """Write a value as an artifact: its JSON, with a first field that names its kind."""
    write_atomically(path, artifact_text(kind, value))


def artifact_text(kind: str, value: Any) -> str:
    """The text of an artifact: one line per field, and lists of numbers on one line.

    Top-level fields are written even if they have their default value, unless they are empty.
    """
    fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    nonempty = {name: item for name, item in fields.items() if item is not None and item not in ([], {})}
    text = json.dumps({"spindle": kind, "version": 1} | nonempty, indent=1) + "\n"
    return re.sub(
        r"\[\n[\s\d.,eE+-]+\]", lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )


def read_artifact(path: Path, kind: str, value_kind: type[T]) -> T:
    """Read what `write_artifact` wrote."""
    return artifact_from_json(read_json_file(path), str(path), kind, value_kind)


def artifact_from_json(data: dict[str, Any], where: str, kind: str, value_kind: type[T]) -> T:
    actual = data.get("spindle")
    if actual != kind:
        what = f"a Spindle {actual}" if isinstance(actual, str) else "not a Spindle artifact"
        raise InputError(f'{where}: expected a Spindle {kind} ("spindle": "{kind}"), this is {what}')
    if data.get("version") != 1:
        raise InputError(f"{where}: this Spindle reads version 1 of a {kind}, got {shown(data.get('version'))}")
    body = {key: item for key, item in data.items() if key not in ("spindle", "version")}
    return from_json(value_kind, body, where)
