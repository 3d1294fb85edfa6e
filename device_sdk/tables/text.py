"""A table of text, whoever wrote it: bytes in, rows of cells out, and what was understood of it.

Everything that reads a list that people have made comes through here: interactions on a device, an
operator's catalogue, a data set. What the bytes do not settle is refused with :class:`TableError`,
which names the option that decides it.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, islice
from pathlib import Path
from typing import Protocol

from device_sdk.system.printable import printable

SEPARATORS = {"tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " ", "::": "::"}
"""By their names for people; the name, or the text itself, is what ``--separator`` takes."""

HEAD_ROWS = 1000
_CHUNK_BYTES = 1 << 20
# Takes the place of "::", which the csv module cannot split at: the first that the text lacks.
_STAND_INS = "\x1f\x1e\x1d\x1c"
_NEVER = "\U0010ffff"  # no character
_SPREADSHEET = re.compile(r"sep=(.)")
_COMMENTS = ("#", "%")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_MARKED = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
"""Encodings that a mark belongs to, and what a file without one is."""
_OTHERS = (
    (b"PK\x03\x04", "a zip archive, or a workbook: unpack it, or save the sheet as CSV"),
    (b"PAR1", "a Parquet file: write it as CSV"),
    (b"BZh", "packed by bzip2: unpack it, or pack it by gzip"),
    (b"\xfd7zXZ", "packed by xz: unpack it, or pack it by gzip"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd: unpack it, or pack it by gzip"),
    (b"SQLite format 3", "an SQLite database: write the table as CSV"),
)
_JSON = re.compile(r"""\s*(\{\s*u?["']|\[\s*[\[{"'])""")
# Letters that ASCII lacks, of which Western texts have few; and those next to another one.
_HIGH = (rb"[\x80-\xff]", rb"(?<=[\x80-\xff])[\x80-\xff]")
_MARK = "\ufeff"
UNREADABLE = "\ufffd"
"""What stands for bytes that are not of the file's encoding."""


class TableError(ValueError):
    """A file cannot be used as a table; the message says where, and which option would decide."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a person says of a file, where it does not say it itself.

    Attributes:
        columns: by role (``user``, ``item``, ``time``, ...) a column's name in the header, or its
            number, from 1. ``none`` as the time's: the file's order is the order.
        separator: one of ``SEPARATORS``, or the text itself; empty: found.
        encoding: a codec of Python's; empty: found.
        time_format: of the times, as ``datetime.strptime`` takes it; empty: found.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    separator: str = ""
    encoding: str = ""
    time_format: str = ""


Progress = Callable[[float], None]
"""Told now and then what share of a file was read."""


def no_progress(share: float) -> None:
    """Tells nobody."""


class Rows(Protocol):
    """The rows of a table, first to last; ``line_num`` is the last line of the newest."""

    @property
    def line_num(self) -> int: ...

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, eq=False)
class TextTable:
    """Rows of a file, not yet read.

    Attributes:
        name: of the file, for people.
        encoding: a codec's name; ``damaged``: not all bytes are of it, and ``UNREADABLE`` stands
            for the others.
        separator: what stands between two cells; empty for a single column.
        width: how many cells nearly all rows have.
        head: the first rows of that many, stripped of surrounding space; at most 1,000. Of a table
            that may have one column, all of the first rows, no shorter than that.
        skipped: how many rows before the first of ``head`` are no part of the table: comments, and
            a spreadsheet's ``sep=;``.
    """

    name: str
    encoding: str
    damaged: bool
    separator: str
    width: int
    head: tuple[tuple[str, ...], ...]
    skipped: int
    _dialect: _Dialect
    _source: _Source

    def rows(self, progress: Progress = no_progress) -> Rows:
        """Every row after those ``skipped``, empty ones and those of another width included, with
        the space around cells."""
        rows = self._dialect.rows(self._source.lines(progress))
        for _ in range(self.skipped):
            next(rows)
        return rows


class _ToldBytes(io.BytesIO):
    """Bytes in memory that tell how far they were read."""

    def __init__(self, data: bytes, progress: Progress) -> None:
        super().__init__(data)
        self._size, self._progress = max(1, len(data)), progress
        self._next = _CHUNK_BYTES

    def read1(self, size: int | None = -1, /) -> bytes:
        found = super().read1(size)
        if self.tell() >= self._next:
            self._next += _CHUNK_BYTES
            self._progress(self.tell() / self._size)
        return found


@dataclass(frozen=True, slots=True)
class _Source:
    """A file's text."""

    data: bytes
    encoding: str
    damaged: bool

    def lines(self, progress: Progress = no_progress) -> Iterator[str]:
        """Ended by line feeds and carriage returns alone: not by what ``splitlines`` takes for an
        end too, which titles hold."""
        errors = "replace" if self.damaged else "strict"
        raw = _ToldBytes(self.data, progress)
        text = io.TextIOWrapper(raw, self.encoding, errors=errors, newline="")
        # At the beginning, and inside of files that were put together.
        return (line.replace(_MARK, "") for line in text) if self.has(_MARK) else text

    def has(self, text: str) -> bool:
        """Whether the text may be in the file."""
        encoded = text.encode(self.encoding, "ignore")
        return bool(encoded) and encoded in self.data


@dataclass(frozen=True, slots=True)
class _Dialect:
    """A separator, or none, and what quotes mean."""

    separator: str
    quoting: str
    stand_in: str = ""
    """What is put in the place of a separator of two characters."""

    def rows(self, lines: Iterable[str]) -> Rows:
        """Raises csv.Error, row by row, where quotes are not as they must be."""
        separator = self.separator
        if self.stand_in:
            lines = (line.replace(separator, self.stand_in) for line in lines)
        delimiter = self.stand_in or separator or _NEVER
        match self.quoting:
            case "doubled" | "spaced":
                beside = self.quoting == "spaced"
                return csv.reader(lines, delimiter=delimiter, skipinitialspace=beside, strict=True)
            case "backslash":
                return csv.reader(
                    lines, delimiter=delimiter, doublequote=False, escapechar="\\", strict=True
                )
        return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)


def _quotings(source: _Source, separator: str) -> tuple[str, ...]:
    """What quotes may mean in a file, to be tried in this order: inside of quotes they are doubled,
    also where a space is before the first one; or stand behind a backslash; or quotes are text."""
    first = "spaced" if separator != " " and source.has(f'{separator} "') else "doubled"
    # Without such a mark the second would take any text behind a quoted one.
    return (first, "backslash", "none") if source.has('\\"') else (first, "none")


def open_table(
    path: str | os.PathLike[str],
    reading: Reading | None = None,
    *,
    one_column: Callable[[Sequence[str]], bool] | None = None,
) -> TextTable:
    """A text file's table: plain or packed by gzip; UTF-8, UTF-16 or UTF-32 with or without a mark,
    else Windows' or ISO's Latin-1; separated by tabs, `::`, commas, semicolons or bars; quoted or
    not. ``one_column``: rows without any separator are a table too, whose cells may hold one in
    most rows; so a first row that it takes for a header decides.

    Raises TableError, OSError.
    """
    reading, name = reading or Reading(), str(path)
    data = _content(Path(path), name)
    source = _Source(data, *_encoding(data, reading.encoding, name))
    first = next((line for line in source.lines() if line.strip()), None)
    if first is None:
        raise TableError(f"{name} holds no rows")
    if _JSON.match(first):
        raise TableError(
            f"{name} holds JSON, or Python's dictionaries; expected a table: a row a line, cells "
            "between commas"
        )
    separator = _separator(source, reading.separator, first, name, one_column)
    return _table(source, separator, name, ragged=one_column is not None)


# From a file's bytes to its encoding.


def _content(path: Path, name: str) -> bytes:
    data = path.read_bytes().removesuffix(b"\x1a")  # which ended files once
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TableError(f"{name} is packed by gzip, and damaged: {error}") from None
    for magic, what in _OTHERS:
        if data.startswith(magic):
            raise TableError(f"{name} is {what}")
    return data


def _encoding(data: bytes, told: str, name: str) -> tuple[str, bool]:
    """A codec's name, and whether some bytes are not of it."""
    if told:
        try:
            encoding = codecs.lookup(told).name
            ",".encode(encoding, "ignore")
            codecs.getincrementaldecoder(encoding)
        except (LookupError, TypeError, ValueError):
            raise TableError(f"--encoding {told!r} is no encoding of text") from None
        if encoding in _MARKED:  # the text that is looked for is to have no mark
            marked = (each for mark, each in _BOMS if data.startswith(mark))
            encoding = next((e for e in marked if e[:6] == encoding), _MARKED[encoding])
        if not _decodes(data, encoding):
            raise TableError(f"{name} is not in the encoding {told} (--encoding)")
        return encoding, False
    for mark, encoding in _BOMS:
        if data.startswith(mark) and _decodes(data, encoding):
            return encoding, False
    if b"\x00" in data:
        return _wide(data, name), False
    if _decodes(data, "utf-8"):
        return "utf-8", False
    text = data.decode("utf-8", errors="surrogateescape")
    broken = sum(1 for _ in re.finditer("[\udc80-\udcff]", text))
    if sum(1 for _ in re.finditer(r"[^\x00-\x7f]", text)) > 2 * broken:
        return "utf-8", True  # most of it is, which other encodings hardly are by chance
    high, beside = (sum(1 for _ in re.finditer(each, data)) for each in _HIGH)
    if 2 * beside > high:
        raise TableError(
            f"{name} is not UTF-8, and no Western text either: --encoding gb18030, shift_jis, "
            "cp1251, ... says what it is"
        )
    windows = any(0x80 <= each < 0xA0 for each in set(data)) and _decodes(data, "cp1252")
    return ("cp1252" if windows else "latin-1"), False


def _wide(data: bytes, name: str) -> str:
    """Of text whose characters take two bytes or four, and which does not begin with a mark."""
    quarter = max(1, len(data) // 4)
    zeros = "".join("0" if data[at::4].count(0) > quarter / 2 else "x" for at in range(4))
    encoding = {"x000": "utf-32-le", "000x": "utf-32-be", "x0x0": "utf-16-le", "0x0x": "utf-16-be"}
    found = encoding.get(zeros, "")
    if not found or not _decodes(data, found):
        raise TableError(f"{name} is no text file: it holds zero bytes")
    return found


def _decodes(data: bytes, encoding: str) -> bool:
    """Whether it is text in the encoding: half a character (UTF-7 has such) is none."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for start in range(0, len(data), _CHUNK_BYTES):
            decoder.decode(data[start : start + _CHUNK_BYTES]).encode()
        decoder.decode(b"", final=True).encode()
    except UnicodeError:
        return False
    return True


# From lines to cells.


def _separator(
    source: _Source,
    told: str,
    first: str,
    name: str,
    one_column: Callable[[Sequence[str]], bool] | None,
) -> str:
    if told:
        separator = SEPARATORS.get(told, told)
        if separator != "::" and (len(separator) != 1 or separator in '"\r\n\x00'):
            raise TableError(
                f"--separator {told!r}: expected one character, or one of {', '.join(SEPARATORS)}"
            )
        return separator
    if match := _SPREADSHEET.fullmatch(first.strip("\r\n")):
        return match[1]
    fits = {each: _fit(source, each) for each in SEPARATORS.values()}
    if one_column:
        if source.has("\t"):
            return "\t"
        for each in SEPARATORS.values():
            if one_column(_first_row(source, each)):
                return each
    # A list of single cells, too, may hold commas, but hardly in each of them.
    least = 0.999 if one_column else 0.5
    fit = {each: fits[each] for each in fits if fits[each][1] >= least}
    for sure in ("\t", "::"):  # which are hardly in all rows of a text by chance
        if sure in fit and fit[sure][0]:
            return sure
    blanks = fit.pop(" ", (False, 0.0))
    best = [each for each in fit if fit[each] == max(fit.values())]
    if len(best) > 1 and "," in best and _is_decimal(source):
        best.remove(",")
    if len(best) == 1:
        return best[0]
    if not best and one_column:
        return ""
    if not best and blanks == (True, 1.0) and _is_numeric(source):
        return " "
    if not best:
        _refuse_long(source, name)
        raise TableError(
            f"{name}: no columns found in lines such as {printable(first.strip(), 80)!r}; expected "
            "as many in each, separated by tabs, commas, semicolons, bars or `::`; --separator "
            "names another"
        )
    names = [each for each, text in SEPARATORS.items() if text in best]
    raise TableError(
        f"{name}: the lines can be split by {names[0]} and by {names[1]}; --separator {names[0]} "
        f"or --separator {names[1]} decides"
    )


def _refuse_long(source: _Source, name: str) -> None:
    """Raises TableError for a line that may hold more in one cell than is read."""
    most = csv.field_size_limit()
    for number, line in enumerate(source.lines(), start=1):
        if len(line) > most:
            raise TableError(
                f"{name}, line {number}: {len(line):,} characters in one line; a cell has "
                f"{most:,} at most: leave the column out that holds such texts"
            )


def _first_row(source: _Source, separator: str) -> list[str]:
    for quoting in _quotings(source, separator):
        try:
            return next(_made(source, separator, quoting).rows(source.lines()), [])
        except csv.Error:
            continue
    return []


def _fit(source: _Source, separator: str) -> tuple[bool, float]:
    """Whether the first row, comments apart, has the most usual number of cells, two at least; and
    the share of the first thousand that have it."""
    if not source.has(separator):
        return False, 0.0
    for quoting in _quotings(source, separator):
        try:
            rows = islice(_made(source, separator, quoting).rows(source.lines()), HEAD_ROWS)
            table = dropwhile(lambda row: row[:1] and row[0].startswith(_COMMENTS), rows)
            widths = [len(row) for row in table if _holds(row)]
        except csv.Error:
            continue
        width, many = max(Counter(widths).items(), key=lambda each: each[1], default=(0, 0))
        return (widths[0] == width, many / len(widths)) if width > 1 else (False, 0.0)
    return False, 0.0


def _is_numeric(source: _Source) -> bool:
    text = "".join(islice(source.lines(), HEAD_ROWS))
    return all(re.fullmatch(r"[0-9.eE+-]+", cell) for cell in text.split())


def _is_decimal(source: _Source) -> bool:
    """Whether every comma stands in a number."""
    text = "".join(islice(source.lines(), HEAD_ROWS))
    return not re.search(r"(?<!\d),|,(?!\d)", text)


def _made(source: _Source, separator: str, quoting: str) -> _Dialect:
    free = "" if separator != "::" else next((e for e in _STAND_INS if not source.has(e)), _NEVER)
    return _Dialect(separator, quoting, free)


def _holds(row: Sequence[str]) -> bool:
    return any(cell and not cell.isspace() for cell in row)


def _table(source: _Source, separator: str, name: str, *, ragged: bool) -> TextTable:
    wrong = ""
    for quoting in _quotings(source, separator):
        dialect = _made(source, separator, quoting)
        rows = dialect.rows(source.lines())
        try:
            widths = Counter(map(len, rows))
        except csv.Error as error:
            wrong = wrong or f"line {rows.line_num}: {error}"
            continue
        if wrong and quoting == "none" and _is_quoted(dialect, source):
            break
        del widths[0]  # empty lines
        return _of_width(source, dialect, widths, name, ragged=ragged)
    raise TableError(
        f"{name} cannot be cut into cells: {wrong}. A quote inside of quotes is written twice"
    )


def _is_quoted(dialect: _Dialect, source: _Source) -> bool:
    """Whether quotes around cells are no text: one pair says so where texts hold the separator,
    and elsewhere, where titles may be `"Heroes"`, pairs in half of the rows."""
    rows = dialect.rows(source.lines())
    found = [any(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in row) for row in rows]
    return any(found) if dialect.separator in (",", ";") else 2 * sum(found) > len(found)


def _of_width(
    source: _Source, dialect: _Dialect, widths: Counter[int], name: str, *, ragged: bool
) -> TextTable:
    width, many = max(widths.items(), key=lambda each: each[1], default=(0, 0))
    if not ragged and 2 * many <= widths.total():
        counts = ", ".join(f"{each} in {widths[each]}" for each in sorted(widths)[:4])
        raise TableError(f"{name}: rows differ in their number of columns: {counts} of them")
    rows = dialect.rows(source.lines())
    head: list[tuple[str, ...]] = []
    skipped = short = line = 0
    for row in rows:
        if not head and (_is_sep(row) or (not ragged and _is_no_row(row, width))):
            skipped += 1
            continue
        if not head and len(row) > width and not ragged:
            raise _odd_first(name, rows.line_num, len(row), width)
        if not head and not ragged:
            short, line = len(row), rows.line_num
        if not head or len(row) == width or ragged:
            head.append((*(cell.strip() for cell in row), *[""] * (width - len(row))))
        if len(head) == HEAD_ROWS:
            break
    if not head:
        raise TableError(f"{name} holds no rows")
    if 0 < short < width and any(any(row[short:]) for row in head):
        raise _odd_first(name, line, short, width)  # the others do not just end in separators
    return TextTable(
        name,
        source.encoding,
        source.damaged,
        dialect.separator,
        width,
        tuple(head),
        skipped,
        dialect,
        source,
    )


def _odd_first(name: str, line: int, first: int, width: int) -> TableError:
    return TableError(
        f"{name}, line {line}: the first row has {first} columns, most of the others have {width}: "
        "remove it, or complete it"
    )


def _is_sep(row: Sequence[str]) -> bool:
    """What tells a spreadsheet the separator."""
    return row[:1] == ["sep="] and not any(row[1:])


def _is_no_row(row: Sequence[str], width: int) -> bool:
    """An empty line, or a comment, before the table."""
    return not _holds(row) or (row[0].lstrip().startswith(_COMMENTS) and len(row) != width)
