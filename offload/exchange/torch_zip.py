"""Strict reader of the list of records in an archive that `torch.save` has written.

An archive is a ZIP file whose records are not compressed. All other archives are refused. A
compressed record may be a thousand times as large in memory, and two readers of ZIP files may
disagree about an archive with an unusual layout.

This module does not import torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from offload.errors import CheckpointError

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")

_MAX_DIRECTORY_BYTES = 128 << 20
"""Largest list of records that is read, in bytes. The list of a million tensors is smaller."""

_UNKNOWN = 0xFFFFFFFF
_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class Record:
    """Place of a record in the file."""

    header: int
    """Offset in the file of the record's local header, in bytes."""

    nbytes: int
    """Size of the record's content."""


class TorchZip:
    """The records of an archive.

    Args:
        file: File that is open for reading. It must stay open as long as the archive is used.
        path: Path of the file, for messages.
        start: Offset of the archive's first byte in the file.
        stop: End of the archive in the file (exclusive), in bytes.

    Raises:
        CheckpointError: The file is not an archive of `torch.save`, or is damaged.
    """

    def __init__(self, file: BinaryIO, path: str, start: int, stop: int) -> None:
        self._file = file
        self._path = path
        self._start = start
        self._compressed = ""
        """Name of the first compressed record; empty if there is none."""
        records = self._records(stop)
        if any(name.endswith("/constants.pkl") for name in records):
            self._refuse("it is a TorchScript archive, which holds a program")
        if self._compressed:
            self._refuse(
                f"its record {self._compressed!r:.80} is compressed, which torch.save never does"
            )
        prefixes = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")]
        prefixes = [prefix for prefix in prefixes if prefix.count("/") == 1]
        if len(prefixes) != 1:
            self._refuse("it has no data.pkl, or several")
        (prefix,) = prefixes
        self._named = {
            name[len(prefix) :]: record
            for name, record in records.items()
            if name.startswith(prefix)
        }

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a small record; empty if the archive has no record of that name.

        Raises:
            CheckpointError: The record is larger than `max_bytes`, or damaged.
        """
        record = self._named.get(name)
        if record is None:
            return b""
        if record.nbytes > max_bytes:
            self._refuse(f"its {name} has {record.nbytes} bytes, at most {max_bytes} are read")
        return self._bytes(self._data_start(record), record.nbytes)

    def locate(self, name: str) -> tuple[int, int]:
        """Return the offset of a record's content in the file, and its length, in bytes.

        Raises:
            CheckpointError: The archive has no such record, or the record is damaged.
        """
        record = self._named.get(name)
        if record is None:
            self._refuse(f"it has no record {name!r:.80}")
        begin = self._data_start(record)
        if begin + record.nbytes > self._end:
            self._refuse(f"its record {name!r:.80} extends past the end of the file")
        return begin, record.nbytes

    def _records(self, stop: int) -> dict[str, Record]:
        """Read the list of records at the end of the archive, which ends at byte `stop`."""
        size = stop - self._start
        if size < _END.size:
            self._refuse("it is cut short")
        at = stop - _END.size
        signature, disk, _, _, num, length, offset, comment = _END.unpack(
            self._bytes(at, _END.size)
        )
        if signature != b"PK\5\6" or comment or disk:
            self._refuse("it does not end as an archive that torch.save writes")
        end = at
        if size >= _END.size + _LOCATOR.size + _END64.size:
            tail = self._bytes(at - _LOCATOR.size, _LOCATOR.size)
            signature, _, place, _ = _LOCATOR.unpack(tail)
            if signature == b"PK\6\7":
                end = at - _LOCATOR.size - _END64.size
                if place != end - self._start:
                    self._refuse("its central directory is not at its stated position")
                found = _END64.unpack(self._bytes(end, _END64.size))
                if found[0] != b"PK\6\6":
                    self._refuse("the end of its central directory is missing")
                num, length, offset = found[7], found[8], found[9]
        if offset + length != end - self._start:
            self._refuse("its central directory is not at its stated position")
        if length > _MAX_DIRECTORY_BYTES or num * _ENTRY.size > length:
            self._refuse(f"a central directory of {num} records in {length} bytes")
        self._end = self._start + offset
        listed = self._bytes(self._end, length)
        return self._parse_entries(listed, num, offset)

    def _parse_entries(self, listed: bytes, num: int, end: int) -> dict[str, Record]:
        records: dict[str, Record] = {}
        at = 0
        for _ in range(num):
            if len(listed) - at < _ENTRY.size:
                self._refuse("its central directory is cut short")
            entry = _ENTRY.unpack_from(listed, at)
            signature, flags, method, packed, nbytes = entry[0], entry[3], entry[4], *entry[8:10]
            name_bytes, extra_bytes, comment_bytes = entry[10:13]
            header = entry[16]
            at += _ENTRY.size
            name = listed[at : at + name_bytes].decode("utf-8", "replace")
            extra = listed[at + name_bytes : at + name_bytes + extra_bytes]
            at += name_bytes + extra_bytes + comment_bytes
            if signature != b"PK\1\2" or at > len(listed):
                self._refuse("its central directory is damaged")
            nbytes, packed, header = _large(extra, nbytes, packed, header)
            if method or packed != nbytes or flags & _ENCRYPTED:
                self._compressed = self._compressed or name
                continue
            if header + _LOCAL.size + nbytes > end:
                self._refuse(f"its record {name!r:.80} extends past the end of the file")
            if name in records:
                self._refuse(f"it has two records {name!r:.80}")
            records[name] = Record(self._start + header, nbytes)
        if at != len(listed):
            self._refuse("its central directory is damaged")
        return records

    def _data_start(self, record: Record) -> int:
        local = _LOCAL.unpack(self._bytes(record.header, _LOCAL.size))
        if local[0] != b"PK\3\4":
            self._refuse("a record does not begin at a valid position")
        return record.header + _LOCAL.size + int(local[9]) + int(local[10])

    def _bytes(self, at: int, nbytes: int) -> bytes:
        self._file.seek(at)
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            self._refuse("it is cut short")
        return data

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {reason}")


def _large(extra: bytes, nbytes: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return size, packed size and header offset of a record in a large (ZIP64) archive.

    Values that do not fit into 32 bits are taken from the extra field.
    """
    found = [nbytes, packed, header]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            found = [next(numbers, v) if v == _UNKNOWN else v for v in found]
            break
        at += 4 + length
    return found[0], found[1], found[2]
