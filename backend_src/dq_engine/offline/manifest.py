"""The manifest of `voxcpm-generate`: JSON lines, CSV or TSV to items, each of them checked by itself."""

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

MAX_ID_BYTES = 200
_ID = re.compile(r"\w[\w.-]*")


class Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One text to speak. The fields are those of `dq_engine.request.Request`, but for

    Args:
        id: names the wav file: letters, digits, `_`, `-` and `.`, the first no `-` or `.`; MAX_ID_BYTES at most.
        reference, prompt: audio files, relative to the manifest's folder.
    """

    id: str
    text: str
    control: str | None = None
    reference: str | None = None
    prompt: str | None = None
    prompt_text: str | None = None
    voice: str | None = None
    lora: str | None = None
    cfg_value: float = 2.0
    temperature: float = 1.0
    seed: int | None = None
    min_generate_length: int | None = None
    max_generate_length: int | None = None


@dataclass(frozen=True)
class Item:
    """A line of the manifest: a row, or what is wrong with it.

    Args:
        line: its number, from 1.
        id: as given, where that could be read; for messages only, if there is an error.
    """

    line: int
    id: str
    row: Row | None = None
    error: str | None = None


class ManifestError(Exception):
    """The manifest as a whole cannot be read; says why."""


def read_manifest(path: Path, ignored: frozenset[str] = frozenset()) -> list[Item]:
    """All items of a manifest, in its order.

    Args:
        path: a file that ends in .jsonl, .csv or .tsv; the latter two have a line with the columns' names. UTF-8.
        ignored: columns that are none of `Row`'s, and may be there all the same.

    Raises:
        ManifestError: it cannot be read.
    """
    readers = {".jsonl": _json_lines, ".csv": lambda file: _table(file, ","), ".tsv": lambda file: _table(file, "\t")}
    if (reader := readers.get(path.suffix.lower())) is None:
        raise ManifestError(f"{path} must end in .jsonl, .csv or .tsv")
    items: list[Item] = []
    seen: dict[str, int] = {}
    try:
        # What is no UTF-8 comes as halves of surrogate pairs, and is told of with its line.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            for line, fields, is_text in reader(file):
                item = _item(line, fields, is_text, ignored)
                if item.row is not None and seen.setdefault(item.id, line) != line:
                    item = Item(line, item.id, error=f"id: line {seen[item.id]} has it already")
                items.append(item)
    except (OSError, ManifestError) as error:
        raise ManifestError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return items


Fields = dict | str
"""A line's fields by name; or what is wrong with it."""


def _json_lines(file) -> Iterator[tuple[int, Fields, bool]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        if not _is_unicode(text):
            yield line, "is no UTF-8", False
            continue
        try:
            fields = json.loads(text)
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # "\ud800"
            yield line, "holds half of a surrogate pair, which is no text", False
        except (ValueError, RecursionError) as error:
            yield line, f"is no JSON: {error}", False
        else:
            yield line, fields if isinstance(fields, dict) else "is no JSON object", False


def _table(file, delimiter: str) -> Iterator[tuple[int, Fields, bool]]:
    csv.field_size_limit(2**31 - 1)  # how long a text may be is the engine's to say, item by item
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if not _is_unicode("".join(names)):
            raise ManifestError("the names of its columns are no UTF-8")
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ManifestError(f'it has two columns named "{twice[0]}"')
        if absent := [name for name in ("id", "text") if names and name not in names]:
            raise ManifestError(f'its first line, which names the columns, has no "{absent[0]}"')
        for cells in rows:
            if not cells:
                continue
            fields: Fields = dict(zip(names, cells, strict=False))
            if len(cells) > len(names):
                fields = "has more cells than there are columns"
            elif not _is_unicode("".join(cells)):
                fields = "is no UTF-8"
            yield rows.line_num, fields, True
    except csv.Error as error:  # a quote that is not closed, say: where the next item begins is unknown
        raise ManifestError(f"line {rows.line_num}: {error}") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _item(line: int, fields: Fields, is_text: bool, ignored: frozenset[str]) -> Item:
    """
    Args:
        is_text: numbers are given as text, and an empty cell is nothing.
    """
    if isinstance(fields, str):
        return Item(line, "", error=fields)
    absent = (None, "") if is_text else (None,)
    given = {k: v for k, v in fields.items() if k not in ignored and (v not in absent or k in ("id", "text"))}
    id = given.get("id")
    if type(id) is int:
        given["id"] = id = str(id)
    shown = id if isinstance(id, str) else ""
    try:
        row = msgspec.convert(given, Row, strict=not is_text)
    except msgspec.ValidationError as error:
        hint = " (--ignore names fields that may be there)" if "unknown field" in str(error) else ""
        return Item(line, shown, error=f"{error}{hint}")
    if not _ID.fullmatch(row.id) or len(row.id.encode()) > MAX_ID_BYTES:
        rule = f"must be 1 to {MAX_ID_BYTES} bytes of letters, digits, _ - and . and begin with none of the last two"
        return Item(line, shown, error=f"id: {rule}")
    return Item(line, shown, row)


def fingerprint(row: Row, folder: Path, voices: Path | None, settings: list) -> str:
    """What an item's audio is made from, so that a change of it is noticed when a run goes on.

    Args:
        folder: of the recordings.
        voices: folder of the stored voices.
        settings: of the engine, those that the audio depends on; anything that JSON knows.
    """
    files = [versions(folder / name) for name in (row.reference, row.prompt) if name is not None]
    if voices is not None and row.voice is not None:
        files.append(versions(voices / f"{row.voice}.safetensors"))
    made_from = [msgspec.structs.asdict(row), files, settings]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def versions(path: Path) -> list:
    """Size and time of a file, or of all files in a folder; nothing of what is not there."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return []
