"""Time of augmenting a batch of 256 images of 32 x 32 under WideLong: inloop, and Pillow one image at a time.

    python -m benchmarks.augment_speed [--repeats 30] [--json]

Both do the same actions; the script checks that the results are equal. They alternate within one run; the report has medians. With
kornia installed, its single operations are measured, too (its results differ, most by a value of 1 here and there).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.augment.pillow_operations import OPERATIONS, from_pil, to_pil
from torch import Tensor

from inloop.augment import AugmentPolicy, TrivialAugment, UniformAugment, apply, apply_operation
from inloop.augment.registry import operation_with_code
from inloop.augment.spaces import SPACES

BATCH, SIDE = 256, 32


def smooth_images(generator: torch.Generator) -> Tensor:
    """Patches of colour with some noise, as photographs are."""
    coarse = torch.rand(BATCH, 3, 6, 6, generator=generator)
    images = F.interpolate(coarse, (SIDE, SIDE), mode="bicubic") * 255
    return (images + 8 * torch.randn(images.shape, generator=generator)).clamp(0, 255).to(torch.uint8)


def by_pillow(images: list, jobs: list) -> list:
    done = []
    for image, todo in zip(images, jobs, strict=True):
        for operation, magnitude, center in todo:
            image = operation(image, magnitude, center)
        done.append(image)
    return done


def jobs_of(actions: dict[str, Tensor]) -> list:
    """For each image, Pillow's functions with their arguments: looking them up is not timed."""
    rows = zip(*(actions[name].tolist() for name in ("operation", "magnitude", "center")), strict=True)
    return [
        [
            (OPERATIONS[operation_with_code(code).name], magnitude, (x * SIDE, y * SIDE))
            for code, magnitude, (x, y) in zip(codes, magnitudes, centers, strict=True)
            if code
        ]
        for codes, magnitudes, centers in rows
    ]


def timed(function: Callable, *arguments: object) -> tuple[float, object]:
    started = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - started, result


def measure_policies(images: Tensor, repeats: int, generator: torch.Generator) -> list[dict[str, object]]:
    results = []
    for name, policy in {"ola": AugmentPolicy("wl"), "ua": UniformAugment("wl"), "ta": TrivialAugment("wl")}.items():
        ours, pillow, converted = [], [], []
        for _ in range(repeats):
            actions = policy.sample(BATCH, generator)
            jobs, pil_images = jobs_of(actions), [to_pil(image) for image in images]
            seconds, augmented = timed(apply, images, actions)
            ours.append(seconds)
            seconds, done = timed(by_pillow, pil_images, jobs)
            pillow.append(seconds)
            seconds, again = timed(
                lambda jobs=jobs: [from_pil(i) for i in by_pillow([to_pil(i) for i in images], jobs)]
            )
            converted.append(seconds)
            assert torch.equal(augmented, torch.stack([from_pil(image) for image in done]))
            assert torch.equal(augmented, torch.stack(again))
        median = statistics.median
        results.append(
            {
                "policy": name,
                "inloop_ms": 1e3 * median(ours),
                "pillow_ms": 1e3 * median(pillow),
                "pillow_with_conversion_ms": 1e3 * median(converted),
                "ratio": median(ours) / median(pillow),
                "ratio_with_conversion": median(ours) / median(converted),
            }
        )
    return results


def measure_operations(images: Tensor, repeats: int, generator: torch.Generator) -> list[dict[str, object]]:
    kornia = kornia_operations()
    pil_images = [to_pil(image) for image in images]
    floats = images.float() / 255
    results = []
    for name in SPACES["wl"].operations:
        magnitudes = torch.tensor(SPACES["wl"].magnitudes[name])
        times: dict[str, list[float]] = {"inloop": [], "pillow": [], "kornia": []}
        for _ in range(repeats):
            strength = torch.randint(1, 31, (BATCH,), generator=generator)
            center = torch.rand(BATCH, 2, generator=generator, dtype=torch.float64) * SIDE
            values = magnitudes[strength]
            jobs = [[(OPERATIONS[name], v, c)] for v, c in zip(values.tolist(), center.tolist(), strict=True)]
            times["inloop"].append(timed(apply_operation, images, name, strength, "wl", 1, center)[0])
            times["pillow"].append(timed(by_pillow, pil_images, jobs)[0])
            if name in kornia:
                times["kornia"].append(timed(kornia[name], floats, values.float())[0])
        medians = {f"{who}_ms": 1e3 * statistics.median(seconds) for who, seconds in times.items() if seconds}
        results.append({"operation": name, **medians})
    return results


def kornia_operations() -> dict[str, Callable]:
    """On floats in 0..1, with one argument for each image; empty without kornia."""
    try:
        import kornia.enhance as enhance
        import kornia.geometry.transform as geometry
    except ImportError:
        return {}

    def pair(v: Tensor, axis: int) -> Tensor:
        return torch.stack([v, 0 * v] if axis == 0 else [0 * v, v], dim=1)

    return {
        "equalize": lambda x, v: enhance.equalize(x),
        "invert": lambda x, v: enhance.invert(x),
        "solarize": lambda x, v: enhance.solarize(x, v / 255),
        "posterize": lambda x, v: enhance.posterize(x, v.int()),
        "brightness": lambda x, v: enhance.adjust_brightness_accumulative(x, v),
        "color": lambda x, v: enhance.adjust_saturation_with_gray_subtraction(x, v),
        "contrast": lambda x, v: enhance.adjust_contrast_with_mean_subtraction(x, v),
        "sharpness": lambda x, v: enhance.sharpness(x, v),
        "rotate": lambda x, v: geometry.rotate(x, v, mode="nearest"),
        "shear_x": lambda x, v: geometry.shear(x, pair(v, 0), mode="nearest"),
        "shear_y": lambda x, v: geometry.shear(x, pair(v, 1), mode="nearest"),
        "translate_x": lambda x, v: geometry.translate(x, pair(v, 0), mode="nearest"),
        "translate_y": lambda x, v: geometry.translate(x, pair(v, 1), mode="nearest"),
        "flip_lr": lambda x, v: geometry.hflip(x),
        "flip_ud": lambda x, v: geometry.vflip(x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    images = smooth_images(generator)
    apply(images, AugmentPolicy("wl").sample(BATCH, generator))  # the first call fills caches
    policies = measure_policies(images, options.repeats, generator)
    operations = measure_operations(images, max(3, options.repeats // 3), generator)
    report = {
        "batch": BATCH,
        "side": SIDE,
        "threads": torch.get_num_threads(),
        "policies": policies,
        "operations": operations,
    }
    if options.json:
        print(json.dumps(report, indent=1))
        return
    for row in policies:
        print(
            f"{row['policy']:4} inloop {row['inloop_ms']:.2f} ms, Pillow {row['pillow_ms']:.2f} ms, ratio {row['ratio']:.3f}; with conversion "
            f"from and to tensors {row['pillow_with_conversion_ms']:.2f} ms, ratio {row['ratio_with_conversion']:.3f}"
        )
    for row in operations:
        print(
            f"{row['operation']:14}",
            *(f"{who} {row[f'{who}_ms']:.2f} ms" for who in ("inloop", "pillow", "kornia") if f"{who}_ms" in row),
        )


if __name__ == "__main__":
    main()
