"""A user's own images: an .npz file, or a folder with a folder for each class."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inloop_lab.data.images import DataError, ImageData

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
_TEST_SHARE = 0.15
_MOST_CLASSES = 1_000_000


def load_own(path: Path) -> ImageData:
    """Read ``path``.

    .npz: arrays ``x`` [N, H, W] or [N, H, W, C] or [N, C, H, W], uint8, and ``y`` [N]; with ``test_x`` and ``test_y``, or a fixed
    random share of 15% is held out for testing. Folder: one folder for each class with images of one size.
    """
    if path.is_dir():
        return _split(path.name, *_read_folders(path))
    if path.suffix == ".npz" and path.is_file():
        return _read_npz(path)
    raise DataError(
        f"{path} is neither an .npz file nor a folder of class folders. Data sets by name: digits, cifar10, cifar100."
    )


def _read_npz(path: Path) -> ImageData:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (
        *(ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error),
        *(MemoryError, OverflowError, RuntimeError, NotImplementedError, SyntaxError, TypeError),  # of headers that lie
    ) as error:
        raise DataError(f"{path} cannot be read as an .npz file of arrays: {error or type(error).__name__}.") from None
    if others := sorted(name for name, array in found.items() if not isinstance(array, np.ndarray)):
        raise DataError(f"{path}: '{others[0]}' is no array.")
    if not {"x", "y"} <= found.keys():
        raise DataError(f"{path} has the arrays {sorted(found)}; it needs 'x' (images) and 'y' (labels).")
    if ("test_x" in found) != ("test_y" in found):
        raise DataError(f"{path} has only one of 'test_x' and 'test_y'; give both or neither.")
    x, y = _images(path, found["x"]), _labels(path, found["y"])
    if len(x) != len(y):
        raise DataError(f"{path}: {len(x)} images but {len(y)} labels.")
    if "test_x" not in found:
        return _split(path.stem, x, y)
    test_x, test_y = _images(path, found["test_x"]), _labels(path, found["test_y"])
    if len(test_x) != len(test_y) or test_x.shape[1:] != x.shape[1:]:
        raise DataError(
            f"{path}: test images {tuple(test_x.shape)} with {len(test_y)} labels beside images {tuple(x.shape)}."
        )
    return ImageData(path.stem, x, y, test_x, test_y, int(max(y.max(), test_y.max())) + 1)


def _labels(path: Path, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or len(array) == 0 or array.min() < 0:
        raise DataError(
            f"{path}: labels of type {array.dtype} and shape {array.shape}; whole numbers from 0, one for each image, are needed."
        )
    if array.max() >= _MOST_CLASSES:
        raise DataError(
            f"{path}: the label {array.max()} is too large; allowed are whole numbers below {_MOST_CLASSES:,}."
        )
    return torch.from_numpy(array.astype(np.int64))


def _images(path: Path, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.size == 0:
        raise DataError(
            f"{path}: images of type {array.dtype} and shape {array.shape}; uint8 with 3 or 4 axes is needed."
        )
    images = torch.from_numpy(array)
    if images.dim() == 3:
        return images.unsqueeze(1)
    if images.shape[1] in (1, 3):
        return images
    if images.shape[3] in (1, 3):
        return images.permute(0, 3, 1, 2).contiguous()
    raise DataError(
        f"{path}: images of shape {array.shape}; 1 or 3 channels are needed, as the second or the last axis."
    )


def _read_folders(path: Path) -> tuple[Tensor, Tensor]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("Reading image files needs Pillow. Fix: pip install pillow.") from None
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(classes) < 2:
        raise DataError(f"{path} has {len(classes)} folders; one for each class is needed, at least 2.")
    images, labels = [], []
    for label, folder in enumerate(classes):
        for file in sorted(p for p in folder.iterdir() if p.suffix.lower() in _SUFFIXES):
            try:
                with Image.open(file) as picture:
                    if picture.mode.startswith(("I", "F")):
                        raise ValueError(f"its pixels are of mode {picture.mode}; 8 bits a channel are needed")
                    images.append(np.asarray(picture.convert("RGB")))
            except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
                raise DataError(f"{file} cannot be read as an image: {error}. Fix: remove or replace it.") from None
            if images[-1].shape != images[0].shape:
                size, first = images[-1].shape[:2], images[0].shape[:2]
                raise DataError(f"{file} is of size {size}, the images before it of {first}. All must be of one size.")
            labels.append(label)
        if label not in labels[-1:]:
            raise DataError(f"{folder} has no image files ({', '.join(sorted(_SUFFIXES))}). Fix: fill or remove it.")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def _split(name: str, x: Tensor, y: Tensor) -> ImageData:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, held_out = x[order], y[order], max(1, round(_TEST_SHARE * len(x)))
    return ImageData(name, x[held_out:], y[held_out:], x[:held_out], y[:held_out], int(y.max()) + 1)
