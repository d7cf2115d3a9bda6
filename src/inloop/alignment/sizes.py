"""Sizes in bytes, below which a kernel costs more than the memory that it moves or frees.

On a GPU the launch of a kernel takes as long as moving some megabytes. A CPU works best on what is still in its cache.
"""

import torch

SMALL_CALL = 1 << 20  # x and dout together: smaller ones are kept as they are
SMALL_PRODUCT = 1 << 18  # a product that is worth a copy, to be summed with others
PRODUCTS = {"cpu": 1 << 20, "other": 1 << 25}  # products that are multiplied together
GROUP = {"cpu": 1 << 22, "other": 1 << 25}  # calls, with their parameters, that are aligned together


def of_device(sizes: dict[str, int], device: torch.device) -> int:
    return sizes["cpu"] if device.type == "cpu" else sizes["other"]
