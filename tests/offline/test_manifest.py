"""Manifests: what is read, and what is wrong with each line by itself."""

import json
from pathlib import Path

import pytest

from dq_engine.offline.manifest import Item, ManifestError, Row, fingerprint, read_manifest, versions


def items(folder: Path, name: str, content: str | bytes, ignored: tuple[str, ...] = ()) -> list[Item]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_manifest(path, frozenset(ignored))


def test_json_lines(tmp_path):
    text = '{"id": "a", "text": "one", "seed": 3, "cfg_value": 1, "lora": null}\n\n{"id": 7, "text": "two"}\n'
    first, second = items(tmp_path, "m.jsonl", text)
    assert first == Item(1, "a", Row(id="a", text="one", seed=3, cfg_value=1.0))
    assert second == Item(3, "7", Row(id="7", text="two"))


@pytest.mark.parametrize(("name", "comma"), [("m.csv", ","), ("m.TSV", "\t")])
def test_tables(tmp_path, name, comma):
    lines = ["id,text,reference,seed,cfg_value,max_generate_length", 'ü-1.x,"a ""b""",r.wav,3,1.5,', "b,c,,,,20"]
    first, second = items(tmp_path, name, ("\ufeff" + "\r\n".join(lines)).replace(",", comma))
    assert first == Item(2, "ü-1.x", Row(id="ü-1.x", text='a "b"', reference="r.wav", seed=3, cfg_value=1.5))
    assert second == Item(3, "b", Row(id="b", text="c", max_generate_length=20))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("m.jsonl", '{"id": "a"}', "Object missing required field `text`"),
        ("m.jsonl", '{"id": "a", "text": "b", "x": 2}', "Object contains unknown field `x` (--ignore names fields"),
        ("m.jsonl", '{"id": "a", "text": 5}', "Expected `str`, got `int` - at `$.text`"),
        ("m.jsonl", '{"id": "a", "text": "b", "seed": 1.5}', "Expected `int | null`, got `float` - at `$.seed`"),
        ("m.jsonl", "{", "is no JSON: "),
        ("m.jsonl", "[1]", "is no JSON object"),
        ("m.jsonl", '"text"', "is no JSON object"),
        ("m.jsonl", "[" * 100_000, "is no JSON: "),
        ("m.jsonl", '{"id": "a", "text": "\\ud800"}', "holds half of a surrogate pair, which is no text"),
        ("m.jsonl", '{"id": "a", "text": "b", "\\udfff": 1}', "holds half of a surrogate pair, which is no text"),
        ("m.jsonl", b'{"id": "a", "text": "b"}\n{"id": "b", "text": "\xff"}', "is no UTF-8"),
        ("m.csv", b"id,text\na,b\nb,\xff", "is no UTF-8"),
        ("m.csv", "id,text\na", "Object missing required field `text`"),
        ("m.csv", "id,text,\na,b,c", "Object contains unknown field ``"),
        ("m.jsonl", '{"id": true, "text": "b"}', "Expected `str`, got `bool` - at `$.id`"),
        ("m.csv", "id,text\na,b,c", "has more cells than there are columns"),
        ("m.csv", "id,text,seed\na,b,x", "Expected `int | null`, got `str` - at `$.seed`"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path, name, content, error):
    *_, item = items(tmp_path, name, content)
    assert item.row is None and item.error.startswith(error)


def test_one_wrong_line_costs_the_others_nothing(tmp_path):
    long = "x" * 200_000  # beyond what Python's csv takes by itself; the engine says that it is too long
    lines = [b'{"id": "a", "text": "%s"}', b'{"id": "b", "text": "\xff"}', b"[", b"", b'{"id": "d", "text": "e"}']
    rows = [b"id,text", b"a,%s", b"b,\xff", b"c", b"", b"d,e"]
    for name, content in ("m.csv", b"\r\n".join(rows)), ("m.jsonl", b"\xef\xbb\xbf" + b"\r\n".join(lines)):
        read = items(tmp_path, name, content % long.encode())
        assert [item.row and (item.row.id, item.row.text) for item in read] == [("a", long), None, None, ("d", "e")]


def test_a_table_of_names_alone_has_no_items(tmp_path):
    assert items(tmp_path, "m.csv", "id,text\n") == items(tmp_path, "m.csv", "") == []


IDS = ["", ".", "..", "../a", "a/b", "a\\b", "/etc/passwd", ".a", "-a", "a\0b", "a b", "a\n", "x" * 201, "ü" * 101]


@pytest.mark.parametrize("id", IDS)
def test_ids_that_are_no_file_names(tmp_path, id):
    (item,) = items(tmp_path, "m.jsonl", json.dumps({"id": id, "text": "t"}))
    assert item.row is None and item.error.startswith("id: must be 1 to 200 bytes of letters, digits")


def test_an_id_belongs_to_its_first_line_and_ignored_fields_may_be_anything(tmp_path):
    text = '{"id": "a", "text": "one", "speaker": [1]}\n{"id": "a", "text": "two"}'
    first, second = items(tmp_path, "m.jsonl", text, ignored=("speaker",))
    assert first.row == Row(id="a", text="one")
    assert second == Item(2, "a", error="id: line 1 has it already")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", "", "must end in .jsonl, .csv or .tsv"),
        ("m.csv", "id,text\na,b".encode("utf-16"), "cannot be read: the names of its columns are no UTF-8$"),
        ("m.csv", 'id,text\na,"b', "cannot be read: line 2: unexpected end of data$"),
        ("m.csv", 'id,text\n"a"b,c\nd,e', "cannot be read: line 2: "),
        ("m.csv", "id,text,text\na,b,c", 'cannot be read: it has two columns named "text"$'),
        ("m.csv", "text,seed\na,1", 'cannot be read: its first line, which names the columns, has no "id"$'),
        ("m.csv", "s1,hello there", 'has no "id"$'),
        ("m.tsv", "id,text\na,b", 'has no "id"$'),
    ],
)
def test_manifests_that_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(ManifestError, match=message):
        items(tmp_path, name, content)
    with pytest.raises(ManifestError, match="No such file"):
        read_manifest(tmp_path / "nothing.csv")


def test_a_fingerprint_tells_text_settings_and_recordings_apart(tmp_path):
    row = Row(id="a", text="one", reference="r.wav", voice="ann", seed=10**40)
    prints = [fingerprint(row, tmp_path, tmp_path, ["m"])]
    for file in "r.wav", "ann.safetensors":
        for data in b"1", b"12":
            (tmp_path / file).write_bytes(data)
            prints.append(fingerprint(row, tmp_path, tmp_path, ["m"]))
    assert fingerprint(row, tmp_path, tmp_path, ["m"]) == prints[-1]
    prints.append(fingerprint(row, tmp_path, tmp_path, ["n"]))
    prints.append(fingerprint(row, tmp_path, None, ["m"]))
    prints.append(fingerprint(Row(id="a", text="two", reference="r.wav"), tmp_path, tmp_path, ["m"]))
    assert len(set(prints)) == len(prints)


def test_versions_of_a_folder_and_of_nothing(tmp_path):
    (tmp_path / "b").write_bytes(b"12")
    (tmp_path / "a").write_bytes(b"")
    assert [(name, size) for name, size, _ in versions(tmp_path)] == [("a", 0), ("b", 2)]
    assert versions(tmp_path / "b") == versions(tmp_path)[1:]
    assert versions(tmp_path / "nothing") == versions(tmp_path / "a\0b") == []
