"""The operations one image at a time, by Pillow itself: the oracle."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor


def to_pil(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def from_pil(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)


def affine(image, *matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.NEAREST)


def cutout(image, share, center):
    width, height = image.size
    side = int(share * width + 1e-9)
    if side <= 0:
        return image
    x0, y0 = int(max(0, center[0] - side / 2)), int(max(0, center[1] - side / 2))
    image = image.copy()
    fill = 0 if image.mode == "L" else (0, 0, 0)
    ImageDraw.Draw(image).rectangle((x0, y0, min(width, x0 + side), min(height, y0 + side)), fill)
    return image


def pillow_operation(image: Image.Image, name: str, v: float, center=(0.0, 0.0)) -> Image.Image:
    """``v`` is the magnitude: degrees, pixels, bits, a factor."""
    operations = {
        "identity": lambda: image,
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "solarize": lambda: ImageOps.solarize(image, int(v)),
        "posterize": lambda: ImageOps.posterize(image, int(v)),
        "color": lambda: ImageEnhance.Color(image).enhance(v),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(v),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(v),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(v),
        "rotate": lambda: image.rotate(v),
        "shear_x": lambda: affine(image, 1, v, 0, 0, 1, 0),
        "shear_y": lambda: affine(image, 1, 0, 0, v, 1, 0),
        "translate_x": lambda: affine(image, 1, 0, v, 0, 1, 0),
        "translate_y": lambda: affine(image, 1, 0, 0, 0, 1, v),
        "blur": lambda: image.filter(ImageFilter.BLUR),
        "flip_lr": lambda: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "flip_ud": lambda: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        "cutout": lambda: cutout(image, v, center),
    }
    return operations[name]()
