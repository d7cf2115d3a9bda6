"""Tokens are written once; rows are of one document, and held-out rows are never trained on."""

import json

import numpy as np
import pytest
import torch

from inloop.errors import FileWriteError
from inloop_lab.data.images import DataError
from inloop_lab.text import cache as cache_module
from inloop_lab.text.cache import Tokens, tokens_of
from inloop_lab.text.domains import IGNORED, Rows, find_domains, split
from inloop_lab.text.tokens import Bytes, FromFile, smallest_type


def write(path, *texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.fixture
def domain(tmp_path):
    return write(tmp_path / "web.jsonl", "abcdefg", "", "x", "hijk")


def test_tokens_of_bytes(domain, tmp_path):
    tokens = tokens_of(domain, Bytes(), tmp_path / "cache")
    assert bytes(tokens.values[:]) == b"abcdefgxhijk"
    assert tokens.ends.tolist() == [7, 8, 12]  # the empty document is none
    assert tokens.values[:].dtype == np.uint8


def test_tokens_are_written_once(domain, tmp_path, monkeypatch):
    tokens_of(domain, Bytes(), tmp_path / "cache")
    monkeypatch.setattr(cache_module, "_write", lambda *arguments: pytest.fail("written again"))
    assert len(tokens_of(domain, Bytes(), tmp_path / "cache").values) == 12


def test_tokens_of_other_files_are_written_anew(domain, tmp_path):
    before = tokens_of(domain, Bytes(), tmp_path / "cache").digest
    write(domain, "other text")
    after = tokens_of(domain, Bytes(), tmp_path / "cache")
    assert after.digest != before
    assert bytes(after.values[:]) == b"other text"


def test_an_interrupted_write_is_begun_anew(domain, tmp_path, monkeypatch):
    def interrupted(piece):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bytes, "encode", lambda self, piece: interrupted(piece))
        tokens_of(domain, Bytes(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(tokens_of(domain, Bytes(), tmp_path / "cache").values) == 12


def test_a_full_disk_is_told_in_a_line(domain, tmp_path, monkeypatch):
    def full(self, piece):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Bytes, "encode", full)
    with pytest.raises(FileWriteError, match="No space left on device"):
        tokens_of(domain, Bytes(), tmp_path / "cache")


def test_an_empty_domain(tmp_path):
    (tmp_path / "web.txt").write_text("")
    with pytest.raises(DataError, match=r"web\.txt is empty: it has no text"):
        tokens_of(tmp_path / "web.txt", Bytes(), tmp_path / "cache")


def test_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[?]": 0, "a": 1, "b": 2}, unk_token="[?]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FromFile(tmp_path / "tokenizer.json")
    assert tokenizer.size == 3
    found = tokens_of(write(tmp_path / "web.jsonl", "a b a", "b c"), tokenizer, tmp_path / "cache")
    assert found.values[:].tolist() == [1, 2, 1, 2, 0]
    (tmp_path / "latin.txt").write_bytes("a b ü".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt, byte 4: no UTF-8"):
        tokens_of(tmp_path / "latin.txt", tokenizer, tmp_path / "cache")
    assert len(tokens_of(tmp_path / "latin.txt", Bytes(), tmp_path / "cache").values) == 5
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer file"):
        FromFile(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("size", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65_537, "uint32")])
def test_tokens_take_little_space(size, dtype):
    assert smallest_type(size) == np.dtype(dtype)


def test_rows_are_of_one_document_and_have_all_of_it(domain, tmp_path):
    rows = Rows(tokens_of(domain, Bytes(), tmp_path / "cache"), length=4)
    found = [(bytes(x[y != IGNORED].tolist()), bytes(y[y != IGNORED].tolist())) for x, y in rows]
    assert found == [(b"abcd", b"bcde"), (b"ef", b"fg"), (b"hij", b"ijk")]
    assert all(len(x) == len(y) == 4 for x, y in rows)


def test_every_token_but_the_first_of_a_document_is_a_label_once():
    generator = np.random.default_rng(0)
    for length in (1, 3, 8):
        ends = np.cumsum(generator.integers(1, 30, size=40))
        tokens = Tokens(np.arange(ends[-1]), ends, "")
        labels = torch.cat([y[y != IGNORED] for _, y in Rows(tokens, length)])
        firsts = {0, *ends[:-1].tolist()}
        assert sorted(labels.tolist()) == [n for n in range(ends[-1]) if n not in firsts]


def test_held_out_rows_are_the_last_ones():
    tokens = Tokens(np.arange(101), np.array([101]), "")
    train, held_out = split("web", tokens, 10, 3)
    assert (len(train), len(held_out)) == (7, 3)
    assert torch.equal(held_out[0][0], torch.arange(70, 80))
    assert torch.equal(train[6][1], torch.arange(61, 71))
    with pytest.raises(IndexError):
        train[7]
    with pytest.raises(DataError, match="Domain 'web' has 10 rows of 10 tokens, of which 10 are to be held out"):
        split("web", tokens, 10, 10)


def test_domains_of_a_folder(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("text")
    write(tmp_path / "web.jsonl", "text")
    (tmp_path / "README.md").write_text("no domain")
    (tmp_path / ".hidden").mkdir()
    assert find_domains(tmp_path) == {"books": tmp_path / "books", "web": tmp_path / "web.jsonl"}
    (tmp_path / "web.txt").write_text("again")
    with pytest.raises(DataError, match=r"two domains named 'web': web\.jsonl and web\.txt"):
        find_domains(tmp_path)


def test_one_domain_is_too_few(tmp_path):
    write(tmp_path / "web.jsonl", "text")
    with pytest.raises(DataError, match="has 1 domains; at least 2 are needed"):
        find_domains(tmp_path)
    with pytest.raises(DataError, match="is no folder"):
        find_domains(tmp_path / "missing")
