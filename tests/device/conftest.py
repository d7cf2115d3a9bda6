import os
import sys
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if "tests.device.plugin" in sys.modules else ["*"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tf32():
    """Matrix products of float32 as many users have them: on tensor cores, which read ten bits of each mantissa. Convolutions always are."""
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def processes_have_the_device(tmp_path, monkeypatch):
    """Load the pretend device in each Python that is started, before it does anything else."""
    folder = tmp_path / "started"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("from tests.device.pretend_cuda.loading import load\n\nload()\n")
    given = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), *([given] if given else [])]))
