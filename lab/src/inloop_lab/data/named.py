"""Data sets by name or path."""

from pathlib import Path

from inloop_lab.data.cifar import CIFAR10, CIFAR100, load_cifar
from inloop_lab.data.digits import load_digits
from inloop_lab.data.images import ImageData
from inloop_lab.data.own import load_own


def load_data(name: str) -> ImageData:
    """``digits``, ``cifar10``, ``cifar100``, or the path of an .npz file or of a folder of class folders."""
    if name == "digits":
        return load_digits()
    if name in ("cifar10", "cifar100"):
        return load_cifar(CIFAR10 if name == "cifar10" else CIFAR100)
    return load_own(Path(name))
