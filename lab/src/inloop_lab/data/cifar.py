"""CIFAR-10 and CIFAR-100 from their official files: the binary layout, or the pickled one that torchvision downloads.

Binary: records of label (CIFAR-100: coarse label, fine label), then 3072 bytes, the red, green and blue plane of 32 x 32.
Pickled: dicts of an array [N, 3072] and a list of labels, read by an unpickler that admits nothing but arrays.
"""

import io
import os
import pickle
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inloop_lab.data.download import download
from inloop_lab.data.images import DataError, ImageData


@dataclass(frozen=True)
class CifarLayout:
    """The address and the file names of a CIFAR data set."""

    name: str
    num_classes: int
    url: str
    md5: str
    binary_folder: str
    binary_train: tuple[str, ...]
    binary_test: str
    label_bytes: int
    pickled_folder: str
    pickled_train: tuple[str, ...]
    pickled_test: str
    pickled_labels: bytes


CIFAR10 = CifarLayout(
    name="cifar10",
    num_classes=10,
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    binary_folder="cifar-10-batches-bin",
    binary_train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    binary_test="test_batch.bin",
    label_bytes=1,
    pickled_folder="cifar-10-batches-py",
    pickled_train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    pickled_test="test_batch",
    pickled_labels=b"labels",
)
CIFAR100 = CifarLayout(
    name="cifar100",
    num_classes=100,
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    binary_folder="cifar-100-binary",
    binary_train=("train.bin",),
    binary_test="test.bin",
    label_bytes=2,
    pickled_folder="cifar-100-python",
    pickled_train=("train",),
    pickled_test="test",
    pickled_labels=b"fine_labels",
)


def data_folder() -> Path:
    """INLOOP_DATA, or a folder for caches in the user's home."""
    return Path(os.environ.get("INLOOP_DATA") or Path.home() / ".cache" / "inloop")


def load_cifar(layout: CifarLayout, folder: Path | None = None) -> ImageData:
    """Read the data set from ``folder``; download it there if it is in neither layout."""
    folder = folder or data_folder()
    if (folder / layout.binary_folder).is_dir():
        return _assemble(layout, folder, *_read_binary(layout, folder / layout.binary_folder))
    if (folder / layout.pickled_folder).is_dir():
        return _assemble(layout, folder, *_read_pickled(layout, folder / layout.pickled_folder))
    archive = download(layout.url, folder / layout.url.rpartition("/")[2], layout.md5)
    with tempfile.TemporaryDirectory(dir=folder) as unpacked:  # in place only when whole
        with tarfile.open(archive) as packed:
            packed.extractall(unpacked, filter="data")
        (Path(unpacked) / layout.binary_folder).rename(folder / layout.binary_folder)
    return _assemble(layout, folder, *_read_binary(layout, folder / layout.binary_folder))


Part = tuple[Tensor, Tensor]


def _assemble(layout: CifarLayout, folder: Path, train: Part, test: Part) -> ImageData:
    return ImageData(layout.name, *train, *test, layout.num_classes, _human_labels(layout, folder, len(train[1])))


def _human_labels(layout: CifarLayout, folder: Path, num_examples: int) -> Tensor | None:
    """CIFAR-10N's labels of the worst annotators, if the file is there and fits; most runs do not need them."""
    path = folder / "cifar-10n" / "labels.npz"
    if layout is not CIFAR10 or not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            labels = torch.from_numpy(arrays["worse_label"]).long()
    except (ValueError, OSError, KeyError, zipfile.BadZipFile):
        return None
    return labels if len(labels) == num_examples and 0 <= int(labels.min()) <= int(labels.max()) < 10 else None


def _read_binary(layout: CifarLayout, folder: Path) -> tuple[Part, Part]:
    def part(names: tuple[str, ...]) -> Part:
        records = torch.from_numpy(np.concatenate([_records(folder / name, layout.label_bytes) for name in names]))
        labels = records[:, layout.label_bytes - 1].long()
        if int(labels.max()) >= layout.num_classes:
            raise DataError(
                f"{folder}: a label of {int(labels.max())} in {layout.name}, which has {layout.num_classes} classes."
            )
        return records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).contiguous(), labels

    return part(layout.binary_train), part((layout.binary_test,))


def _records(path: Path, label_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    length = label_bytes + 3072
    if not path.is_file():
        raise DataError(f"{path} is missing. Fix: remove its folder to download it again, or restore the file.")
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) == 0 or len(raw) % length:
        raise DataError(
            f"{path} has {len(raw)} bytes, which is no multiple of {length}: it is truncated or of another format. Fix: remove its "
            "folder to download it again."
        )
    return raw.reshape(-1, length)


class _ArraysOnly(pickle.Unpickler):
    """Admits the classes of a pickled numpy array only: other pickles can run any code."""

    _ADMITTED = frozenset(
        (module, name)
        for module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("ndarray", "dtype", "_reconstruct")
    ) | {("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ADMITTED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _read_pickled(layout: CifarLayout, folder: Path) -> tuple[Part, Part]:
    def part(names: tuple[str, ...]) -> Part:
        images, labels = [], []
        for name in names:
            content = _unpickle(folder / name)
            pixels, found = content.get(b"data"), content.get(layout.pickled_labels)
            if not isinstance(pixels, np.ndarray) or not isinstance(found, list) or pixels.shape != (len(found), 3072):
                raise DataError(
                    f"{folder / name} is no batch of {layout.name}: it needs an array of [N, 3072] and N labels."
                )
            images.append(torch.from_numpy(pixels.astype(np.uint8)).reshape(-1, 3, 32, 32))
            labels.append(torch.tensor(found).long())
        return torch.cat(images), torch.cat(labels)

    return part(layout.pickled_train), part((layout.pickled_test,))


def _unpickle(path: Path) -> dict[bytes, Any]:
    if not path.is_file():
        raise DataError(f"{path} is missing. Fix: restore the file, or remove its folder to download the data again.")
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} cannot be read as a pickled batch of arrays: {error}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not the dict of a CIFAR batch.")
    return content
