"""The 1,797 handwritten digits that come with the package, 8 x 8 pixels, 10 classes.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998
(https://doi.org/10.24432/C50P49), the test part, as distributed with scikit-learn; licence CC BY 4.0.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor


def load_digits() -> tuple[Tensor, Tensor]:
    """Images as float32 in [-1, 1], shape [N, 1, 8, 8], and labels, shape [N]."""
    with (files("inloop.lab") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images_NHW, labels_N = torch.from_numpy(arrays["images_NHW"]), torch.from_numpy(arrays["labels_N"])
    return (images_NHW.float() / 8 - 1).unsqueeze(1), labels_N.long()
