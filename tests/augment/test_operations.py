"""Every operation against Pillow, pixel for pixel."""

import pytest
import torch

from inloop.augment import SPACES, apply_operation, get_space
from tests.augment.pillow_operations import from_pil, pillow_operation, to_pil

SIGNED = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


def sample_images(channels: int, height: int, width: int, n: int = 4) -> torch.Tensor:
    """Random, smooth, of low contrast, constant, nearly constant, and with one value in most pixels."""
    g = torch.Generator().manual_seed(height * 1000 + width + channels)
    shape = (n, channels, height, width)
    random = torch.randint(256, shape, generator=g)
    coarse = torch.rand(n, channels, 3, 3, generator=g)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear") * 255
    low = 100 + torch.randint(9, shape, generator=g)
    constant = torch.randint(256, (n, channels, 1, 1), generator=g).expand(shape)
    dot = constant.clone()
    dot[:, :, height // 2, width // 3] = 255
    mostly = torch.where(torch.rand(shape, generator=g) < 0.97, 255, random)
    black_and_white = torch.cat([torch.zeros(1, *shape[1:]), torch.full((1, *shape[1:]), 255)])
    return torch.cat([random, smooth, low, constant, dot, mostly, black_and_white]).to(torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 33), (41, 24), (8, 8), (2, 3), (4, 7), (1, 1)])
@pytest.mark.parametrize("space", ["ra", "wl", "uniaug", "standard"])
def test_every_operation_and_strength_equals_pillow(space, height, width, channels):
    images = sample_images(channels, height, width, n=1 if space in ("uniaug", "standard") else 2)
    pils = [to_pil(image) for image in images]
    generator = torch.Generator().manual_seed(0)
    for name in get_space(space).operations:
        magnitudes = get_space(space).magnitudes[name]
        for strength in range(31) if len(set(magnitudes)) > 1 else (0, 30):
            for sign in (1, -1) if name in SIGNED else (1,):
                center = torch.rand(len(images), 2, generator=generator, dtype=torch.float64) * torch.tensor(
                    [width, height]
                )
                strengths = torch.full((len(images),), strength)
                got = apply_operation(images, name, strengths, space, sign_N=sign, center_N2=center)
                v = sign * magnitudes[strength]
                expected = torch.stack(
                    [from_pil(pillow_operation(pil, name, v, c)) for pil, c in zip(pils, center.tolist(), strict=True)]
                )
                assert torch.equal(got, expected), (name, strength, sign)


def test_all_angles_equal_pillow():
    for height, width in ((32, 32), (31, 31), (17, 26)):
        image = sample_images(3, height, width, n=1)[:1]
        from inloop.augment.image_operations import rotate
        from inloop.augment.primitives import affine

        angles = torch.arange(-360, 361, dtype=torch.float64)
        got = affine(image.expand(len(angles), -1, -1, -1), rotate(image, angles, torch.zeros(len(angles), 2)))
        for angle, rotated in zip(angles.tolist(), got, strict=True):
            assert torch.equal(rotated, from_pil(to_pil(image[0]).rotate(angle))), angle


def test_every_builtin_operation_is_in_a_space():
    assert set(SPACES["wl"].operations) >= {name for space in SPACES.values() for name in space.operations}
