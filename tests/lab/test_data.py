"""Data: the digits, CIFAR's two layouts, a user's own images, downloads, and what is wrong with damaged files."""

import contextlib
import hashlib
import http.server
import io
import pickle
import tarfile
import threading
import zipfile
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from inloop.datasets import digits
from inloop_lab.data.cifar import CIFAR10, CIFAR100, load_cifar
from inloop_lab.data.digits import load_digits
from inloop_lab.data.download import download
from inloop_lab.data.images import DataError, to_input
from inloop_lab.data.named import load_data
from inloop_lab.data.own import load_own
from inloop_lab.splits.noise import make_splits

# ------------------------------------------------------------------ digits


def test_the_digits_are_all_there():
    x, y = digits()
    assert x.shape == (1797, 1, 8, 8)
    assert (x.min(), x.max()) == (-1, 1)
    assert torch.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    data = load_digits()
    assert len(data.train_x) + len(data.test_x) == 1797
    assert torch.equal(data.train_x, load_digits().train_x)  # the same ones each time
    assert to_input(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]


# ------------------------------------------------------------------ CIFAR


def fake_images(n, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)


def write_binary(folder, layout):
    folder = folder / layout.binary_folder
    folder.mkdir(parents=True)
    for seed, name in enumerate([*layout.binary_train, layout.binary_test]):
        pixels, labels = fake_images(4, seed)
        columns = [labels[:, None]] if layout.label_bytes == 1 else [np.zeros((4, 1), np.uint8), labels[:, None]]
        (folder / name).write_bytes(np.concatenate([*columns, pixels], axis=1).tobytes())


def write_pickled(folder, layout):
    folder = folder / layout.pickled_folder
    folder.mkdir(parents=True)
    for seed, name in enumerate([*layout.pickled_train, layout.pickled_test]):
        pixels, labels = fake_images(4, seed)
        content = {b"data": pixels, layout.pickled_labels: labels.tolist(), b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)
@pytest.mark.parametrize("write", [write_binary, write_pickled])
def test_both_layouts_of_cifar(layout, write, tmp_path):
    write(tmp_path, layout)
    data = load_cifar(layout, tmp_path)
    pixels, labels = fake_images(4, 0)
    assert torch.equal(data.train_x[:4], torch.from_numpy(pixels).reshape(4, 3, 32, 32))
    assert data.train_y[:4].tolist() == labels.tolist()
    assert len(data.train_x) == 4 * len(layout.binary_train)
    assert len(data.test_x) == 4
    assert data.num_classes == layout.num_classes


def test_human_labels_are_found_beside_the_data(tmp_path, monkeypatch):
    write_binary(tmp_path, CIFAR10)
    (tmp_path / "cifar-10n").mkdir()
    np.savez(tmp_path / "cifar-10n" / "labels.npz", worse_label=np.arange(20, dtype=np.uint8) % 10)
    monkeypatch.setenv("INLOOP_DATA", str(tmp_path))
    data = load_data("cifar10")
    assert data.human_labels.tolist() == [i % 10 for i in range(20)]
    (_, labels), *_ = make_splits(data, 4, "human", torch.Generator().manual_seed(0))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert labels.tolist() == [int(i) % 10 for i in order[:5]]


def test_damaged_binary_files_are_named(tmp_path):
    write_binary(tmp_path, CIFAR10)
    file = tmp_path / CIFAR10.binary_folder / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(
        DataError, match="data_batch_2.bin has 12287 bytes, which is no multiple of 3073: it is truncated"
    ):
        load_cifar(CIFAR10, tmp_path)
    file.unlink()
    with pytest.raises(DataError, match="data_batch_2.bin is missing"):
        load_cifar(CIFAR10, tmp_path)
    file.write_bytes(bytes([77]) * 3073)
    with pytest.raises(DataError, match="a label of 77 in cifar10"):
        load_cifar(CIFAR10, tmp_path)


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


def test_a_pickle_that_would_execute_code_is_refused(tmp_path, capsys):
    write_pickled(tmp_path, CIFAR10)
    file = tmp_path / CIFAR10.pickled_folder / "data_batch_1"
    file.write_bytes(pickle.dumps({b"data": Harmful()}))
    with pytest.raises(DataError, match=r"cannot be read as a pickled batch of arrays: it refers to builtins.print"):
        load_cifar(CIFAR10, tmp_path)
    assert "executed" not in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(DataError, match="cannot be read"):
        load_cifar(CIFAR10, tmp_path)
    file.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="holds a list"):
        load_cifar(CIFAR10, tmp_path)


def test_pickled_batches_that_do_not_fit_and_damaged_human_labels(tmp_path):
    write_pickled(tmp_path, CIFAR10)
    (tmp_path / "cifar-10n").mkdir()
    (tmp_path / "cifar-10n" / "labels.npz").write_bytes(b"nonsense")
    assert load_cifar(CIFAR10, tmp_path).human_labels is None  # most runs have no use for them
    file = tmp_path / CIFAR10.pickled_folder / "data_batch_1"
    pixels, labels = fake_images(4, 0)
    for content in ({b"data": pixels}, {b"data": pixels, b"labels": labels.tolist()[:3]}):
        file.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match="data_batch_1 is no batch of cifar10"):
            load_cifar(CIFAR10, tmp_path)


# ------------------------------------------------------------------ downloads


class Server(http.server.BaseHTTPRequestHandler):
    content, cut_at, ranges = b"", None, True
    requests: ClassVar[list] = []

    def do_GET(self):
        start = 0
        asked = self.headers.get("Range")
        Server.requests.append(asked)
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        body = self.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.cut_at is None else body[: self.cut_at])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Server.content, Server.cut_at, Server.ranges, Server.requests = b"0123456789" * 1000, None, True, []
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/file.bin"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def md5(content):
    return hashlib.md5(content).hexdigest()


def test_a_download_is_checked_and_put_in_place(server, tmp_path):
    target = tmp_path / "data" / "file.bin"
    assert download(server, target, md5(Server.content)) == target
    assert target.read_bytes() == Server.content
    assert [p.name for p in target.parent.iterdir()] == ["file.bin"]
    download(server, target, md5(Server.content))
    assert len(Server.requests) == 1  # it is there


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_is_continued(server, tmp_path, ranges):
    target = tmp_path / "file.bin"
    Server.cut_at, Server.ranges = 4000, ranges
    with pytest.raises(DataError, match=r"could not be downloaded .*the same command continues the download"):
        download(server, target, md5(Server.content))
    assert not target.exists()
    assert (tmp_path / "file.bin.part").stat().st_size == 4000
    Server.cut_at = None
    download(server, target, md5(Server.content))
    assert target.read_bytes() == Server.content
    assert Server.requests[-1] == "bytes=4000-"


def test_a_download_with_another_checksum_is_removed(server, tmp_path):
    with pytest.raises(DataError, match="has the md5 .* it should be 0000. The download was removed"):
        download(server, tmp_path / "file.bin", "0000")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"could not be downloaded .* name the folder that has them with INLOOP_DATA"):
        download("http://127.0.0.1:9/file.bin", tmp_path / "file.bin", "0000")


def test_cifar_is_downloaded_when_it_is_nowhere(server, tmp_path):
    made = tmp_path / "made"
    write_binary(made, CIFAR10)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(made / CIFAR10.binary_folder, CIFAR10.binary_folder)
    Server.content = buffer.getvalue()
    layout = replace(CIFAR10, url=server, md5=md5(Server.content))
    assert len(load_cifar(layout, tmp_path / "cache").train_x) == 20


# ------------------------------------------------------------------ own data


def test_own_arrays(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
    y = np.arange(40) % 4
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    data = load_own(tmp_path / "mine.npz")
    assert data.train_x.shape == (34, 3, 6, 5)
    assert data.test_x.shape == (6, 3, 6, 5)
    assert data.num_classes == 4
    np.savez(tmp_path / "grey.npz", x=x[..., 0], y=y, test_x=x[:3, ..., 0], test_y=y[:3])
    grey = load_data(str(tmp_path / "grey.npz"))
    assert grey.train_x.shape == (40, 1, 6, 5)
    assert len(grey.test_x) == 3


def test_own_folders(tmp_path):
    for label, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.fromarray(np.full((5, 4, 3), 100 * label + i, np.uint8)).save(tmp_path / name / f"{i}.png")
        (tmp_path / name / "notes.txt").write_text("not an image")
    data = load_own(tmp_path)
    assert len(data.train_x) + len(data.test_x) == 20
    assert data.train_x.shape[1:] == (3, 5, 4)
    assert torch.equal((data.train_x[:, 0, 0, 0] >= 100).long(), data.train_y)
    Image.fromarray(np.full((5, 4), 40_000, np.uint16)).save(tmp_path / "dog" / "broken.png")
    with pytest.raises(DataError, match="8 bits a channel are needed"):
        load_own(tmp_path)
    (tmp_path / "dog" / "broken.png").write_bytes(b"\x89PNG nonsense")
    with pytest.raises(DataError, match=r"broken.png cannot be read as an image"):
        load_own(tmp_path)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "dog" / "broken.png")
    with pytest.raises(DataError, match=r"broken.png is of size \(9, 9\), the images before it of \(5, 4\)"):
        load_own(tmp_path)


def test_own_data_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(DataError, match="neither an .npz file nor a folder"):
        load_own(tmp_path / "nothing")
    with pytest.raises(DataError, match="has 0 folders; one for each class"):
        load_own(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / ".thumbs").mkdir()  # hidden folders are no classes
    with pytest.raises(DataError, match=r"a has no image files .* Fix: fill or remove it"):
        load_own(tmp_path)
    for arrays, message in (
        ({"images": np.zeros(3)}, r"has the arrays \['images'\]; it needs 'x'"),
        ({"x": np.zeros((3, 4, 4)), "y": np.zeros(3)}, r"type float64 and shape \(3, 4, 4\); uint8"),
        ({"x": np.zeros((3, 4, 4), np.uint8), "y": np.zeros(2, int)}, "3 images but 2 labels"),
        ({"x": np.zeros((3, 4, 4), np.uint8), "y": np.zeros(3)}, "labels of type float64"),
        ({"x": np.zeros((3, 4, 4), np.uint8), "y": np.array([0, -1, 2])}, "whole numbers from 0"),
        ({"x": np.zeros((3, 4, 4), np.uint8), "y": np.eye(3, dtype=int)}, r"shape \(3, 3\)"),
        ({"x": np.zeros((0, 4, 4), np.uint8), "y": np.zeros(0, int)}, r"shape \(0, 4, 4\)"),
        ({"x": np.zeros((3, 4, 4, 2), np.uint8), "y": np.zeros(3, int)}, "1 or 3 channels are needed"),
        (
            {"x": np.zeros((3, 4, 4), np.uint8), "y": np.zeros(3, int), "test_x": np.zeros((1, 4, 4), np.uint8)},
            "only one of",
        ),
        (
            {
                "x": np.zeros((3, 4, 4), np.uint8),
                "y": np.zeros(3, int),
                "test_x": np.zeros((1, 5, 4), np.uint8),
                "test_y": np.zeros(1, int),
            },
            r"test images \(1, 1, 5, 4\)",
        ),
    ):
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(DataError, match=message):
            load_own(tmp_path / "bad.npz")
    whole = (tmp_path / "bad.npz").read_bytes()
    (tmp_path / "bad.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as an .npz file"):
        load_own(tmp_path / "bad.npz")
    (tmp_path / "bad.npz").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be read as an .npz file"):
        load_own(tmp_path / "bad.npz")


# ------------------------------------------------------------------ splits and noise


@pytest.mark.parametrize("noise", ["labels", "images", "none"])
def test_only_the_first_split_is_noisy(noise):
    data = load_digits()
    splits = make_splits(data, 10, noise, torch.Generator().manual_seed(1))
    clean = make_splits(data, 10, "none", torch.Generator().manual_seed(1))
    assert {len(x) for x, _ in splits} == {150}
    for split, (x, y) in enumerate(splits):
        assert torch.equal(x, clean[split][0]) == (noise != "images" or split != 0)
        assert torch.equal(y, clean[split][1]) == (noise != "labels" or split != 0)
    if noise == "labels":
        right = (splits[0][1] == clean[0][1]).float().mean()
        assert 0 < right < 0.25  # a tenth stays right by chance


def test_noise_that_is_not_to_be_had_is_named():
    with pytest.raises(DataError, match="digits has no human labels"):
        make_splits(load_digits(), 10, "human", torch.Generator())
    with pytest.raises(DataError, match="1500 training examples; they cannot be split into 2000"):
        make_splits(load_digits(), 2000, "none", torch.Generator())


# ------------------------------------------------------------------ hostile files


def archive(path, **members):
    """An .npz file of these members: arrays, or the bytes of a file."""
    with zipfile.ZipFile(path, "w") as file:
        for name, member in members.items():
            content = io.BytesIO()
            if isinstance(member, bytes):
                file.writestr(name, member)
            else:
                np.save(content, member)
                file.writestr(f"{name}.npy", content.getvalue())
    return path


def header(shape):
    """The head of an .npy file that claims this shape."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


IMAGES = np.zeros((4, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"x.npy": header("(99999999999, 99999999999)"), "y": np.arange(4)}, "cannot be read"),
        ({"x.npy": header("(-3, 8, 8)"), "y": np.arange(4)}, "cannot be read|images of type"),
        ({"x.npy": header("'many'"), "y": np.arange(4)}, "cannot be read"),
        ({"x": IMAGES, "y": np.arange(4), "readme.txt": b"hello"}, "'readme.txt' is no array"),
        ({"x": IMAGES, "y": np.array([0, 1, 2, 2**64 - 1], np.uint64)}, "18446744073709551615 is too large"),
        ({"x": IMAGES, "y": np.array([0, 1, 2, 2_000_000])}, "2000000 is too large"),
    ],
)
def test_a_file_that_lies_is_refused_in_a_line(tmp_path, members, says):
    with pytest.raises(DataError, match=says):
        load_own(archive(tmp_path / "own.npz", **members))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1), content=st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, place, content):
    path = archive(tmp_path_factory.mktemp("own") / "own.npz", x=IMAGES, y=np.arange(4))
    raw = bytearray(path.read_bytes())
    start = int(place * (len(raw) - 1))
    raw[start : start + len(content)] = content
    path.write_bytes(raw)
    with contextlib.suppress(DataError):
        assert len(load_own(path).train_x)
