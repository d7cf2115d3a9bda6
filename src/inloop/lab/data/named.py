"""Data sets by name or path."""

from pathlib import Path

from inloop.lab.data.cifar import CIFAR10, CIFAR100, load_cifar
from inloop.lab.data.digits import digits
from inloop.lab.data.images import ImageData
from inloop.lab.data.own import load_own


def load_data(name: str) -> ImageData:
    """``digits``, ``cifar10``, ``cifar100``, or the path of an .npz file or of a folder of class folders."""
    if name == "digits":
        return digits()
    if name in ("cifar10", "cifar100"):
        return load_cifar(CIFAR10 if name == "cifar10" else CIFAR100)
    return load_own(Path(name))
