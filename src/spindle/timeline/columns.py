"""Columns of integers in few bytes, for files and for the report's page.

A column is stored as differences between neighbours, in zigzag encoding (0, -1, 1, -2, 2 become 0, 1, 2, 3, 4): first
the lowest byte of every number, then the second byte of every number, up to the width of the largest. Neighbouring
spans are similar, so most bytes are zero and compress well, and numpy and JavaScript each read them in one pass.
`page/data.js` of the report is the other reader.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spindle.errors import InputError

Column = NDArray[np.int64]

_MAX_BYTES = 1 << 31  # unpacked; a file with more is not a timeline


def pack(header: Mapping[str, Any], columns: Mapping[str, Column]) -> bytes:
    """Compress columns by gzip, behind a line of JSON that describes them. The same values give the same bytes."""
    parts, directory = [], []
    for name, column in columns.items():
        values = np.asarray(column, dtype=np.int64)
        differences = np.diff(values, prepend=0)
        unsigned = ((differences << 1) ^ (differences >> 63)).astype("<u8")
        width = (int(unsigned.max(initial=0)).bit_length() + 7) // 8
        parts.append(unsigned.view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
        directory.append([name, len(values), width])
    text = json.dumps({**header, "columns": directory}, separators=(",", ":"), ensure_ascii=True)
    return gzip.compress(b"".join([text.encode(), b"\n", *parts]), compresslevel=9, mtime=0)


def unpack(data: bytes, where: str) -> tuple[dict[str, Any], dict[str, Column]]:
    """Read what `pack` wrote. Raises an InputError of one sentence if the data is truncated or in another format."""
    content = _inflated(data, where)
    line, newline, rest = content.partition(b"\n")
    try:
        header = json.loads(line)
        directory = [(str(name), int(count), int(width)) for name, count, width in header.pop("columns")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{where}: has no header that says which columns it holds") from error
    expected = sum(count * width for _, count, width in directory)
    valid = all(count >= 0 and 0 <= width <= 8 for _, count, width in directory)
    if not newline or not valid or len(rest) != expected:
        raise InputError(f"{where}: has {len(rest)} bytes of columns, its header says {expected}")
    columns, place = {}, 0
    for name, count, width in directory:
        planes = np.zeros((count, 8), dtype=np.uint8)
        words = np.frombuffer(rest, dtype=np.uint8, count=count * width, offset=place)
        planes[:, :width] = words.reshape(width, count).T
        unsigned = planes.view("<u8").reshape(count)
        signed = (unsigned >> np.uint64(1)).astype(np.int64) ^ -(unsigned & np.uint64(1)).astype(np.int64)
        columns[name] = np.cumsum(signed, dtype=np.int64)
        place += count * width
    return header, columns


def _inflated(data: bytes, where: str) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        raise InputError(f"{where}: is not a gzip file" if data else f"{where}: is empty")
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(data, _MAX_BYTES)
    except zlib.error as error:
        raise InputError(f"{where}: is damaged ({error})") from error
    if stream.unconsumed_tail:
        raise InputError(f"{where}: holds more than {_MAX_BYTES:,} bytes")
    if not stream.eof:
        raise InputError(f"{where}: is cut off; copy it again")
    if stream.unused_data:
        raise InputError(f"{where}: has {len(stream.unused_data)} bytes after its end")
    return content
