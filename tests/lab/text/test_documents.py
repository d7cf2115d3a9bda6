"""Documents of every kind of file, and what cannot be read."""

import json

import pytest

from inloop_lab.data.images import DataError
from inloop_lab.text import documents as module
from inloop_lab.text.documents import documents, files_of


def texts(path):
    """The documents, put together again."""
    found, open_one = [], b""
    for piece in documents(path):
        open_one += piece.content
        if piece.ends:
            found.append(open_one.decode())
            open_one = b""
    assert not open_one
    return found


def test_a_text_file_is_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert texts(tmp_path / "a.txt") == ["one\ntwo\n"]


@pytest.mark.parametrize(
    "text", ["a line\n" * 100, "no end of a line " * 50, "äöü€𝄞" * 60, "€" * 100 + "\n" + "x" * 100]
)
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_a_large_file_is_read_in_pieces_that_are_whole_characters(tmp_path, monkeypatch, text, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    (tmp_path / "a.txt").write_text(text)
    pieces = list(documents(tmp_path / "a.txt"))
    assert max(len(piece.content) for piece in pieces) <= 2 * chunk + 7
    assert "".join(piece.content.decode() for piece in pieces) == text


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = [{"text": "one"}, {"text": "zwölf\nlines", "id": 3}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert texts(tmp_path / "a.jsonl") == ["one", "zwölf\nlines"]


def test_a_folder_has_the_documents_of_all_its_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}')
    (tmp_path / "notes.md").write_text("not read")
    assert texts(tmp_path) == ["first", "second"]


def test_each_row_of_a_parquet_file_is_a_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "id": [1, 2]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one", "two"]
    parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"has the columns body; needed is 'text'"):
        texts(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        texts(tmp_path / "c.parquet")


def test_a_dataset_of_hugging_face_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "saved") == ["one", "two"]
    assert files_of(tmp_path / "saved") == [tmp_path / "saved"]


def test_a_reader_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="takes the package pyarrow. Fix: pip install pyarrow"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: no JSON"),
        ("[1]", "'text' is missing, or no text"),
        ('{"body": "x"}', "'text' is missing"),
        ('{"text": 3}', "no text"),
        ('{"text": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_a_line_that_is_no_document(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.jsonl")


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="has no file that ends in"):
        files_of(tmp_path)
