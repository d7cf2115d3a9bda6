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


# By name: (image, magnitude, center); the magnitude is in degrees, pixels, bits, or a factor.
OPERATIONS = {
    "identity": lambda image, v, c: image,
    "auto_contrast": lambda image, v, c: ImageOps.autocontrast(image),
    "equalize": lambda image, v, c: ImageOps.equalize(image),
    "invert": lambda image, v, c: ImageOps.invert(image),
    "solarize": lambda image, v, c: ImageOps.solarize(image, int(v)),
    # Pillow from 13 on refuses 0 bits; before, they left a black image
    "posterize": lambda image, v, c: ImageOps.posterize(image, int(v)) if v else Image.new(image.mode, image.size),
    "color": lambda image, v, c: ImageEnhance.Color(image).enhance(v),
    "contrast": lambda image, v, c: ImageEnhance.Contrast(image).enhance(v),
    "brightness": lambda image, v, c: ImageEnhance.Brightness(image).enhance(v),
    "sharpness": lambda image, v, c: ImageEnhance.Sharpness(image).enhance(v),
    "rotate": lambda image, v, c: image.rotate(v),
    "shear_x": lambda image, v, c: affine(image, 1, v, 0, 0, 1, 0),
    "shear_y": lambda image, v, c: affine(image, 1, 0, 0, v, 1, 0),
    "translate_x": lambda image, v, c: affine(image, 1, 0, v, 0, 1, 0),
    "translate_y": lambda image, v, c: affine(image, 1, 0, 0, 0, 1, v),
    "blur": lambda image, v, c: image.filter(ImageFilter.BLUR),
    "flip_lr": lambda image, v, c: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "flip_ud": lambda image, v, c: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    "cutout": cutout,
}


def pillow_operation(image: Image.Image, name: str, magnitude: float, center=(0.0, 0.0)) -> Image.Image:
    return OPERATIONS[name](image, magnitude, center)
