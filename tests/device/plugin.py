"""A pytest plugin that loads the pretend CUDA device before anything imports torch.

    python -m pytest -p tests.device.plugin tests/device          (make test-device)

Without the plugin nothing in this folder is collected: the device would change what other tests see of torch.
"""

from tests.device.pretend_cuda.building import CannotBuildError
from tests.device.pretend_cuda.loading import load

why_there_is_none = ""
try:
    load()
except CannotBuildError as error:
    why_there_is_none = f"no pretend CUDA device: {error}"
