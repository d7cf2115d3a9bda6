"""Checkpoints are whole or refused, name the one before, and never execute code."""

import hashlib
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from inloop.checkpoints import Checkpoints, read_checkpoint
from inloop.errors import CheckpointError, UsageError


@pytest.fixture
def checkpoints(tmp_path):
    kept = Checkpoints(tmp_path / "run", keep=3)
    for step in (10, 20, 30, 40):
        kept.save(step, {"x": torch.full((100,), float(step)), "step": step})
    return kept


def test_the_newest_few_are_kept(checkpoints):
    assert checkpoints.steps() == [20, 30, 40]
    step, state = checkpoints.load()
    assert step == state["step"] == 40
    assert torch.equal(state["x"], torch.full((100,), 40.0))
    assert checkpoints.load(step=20)[1]["step"] == 20


@pytest.mark.parametrize("position", [0, 30, 120, 600, -1])
def test_a_changed_byte_is_seen_and_the_one_before_offered(checkpoints, position):
    path = checkpoints.path(40)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000040.pt .*of step 30, is whole: load\(step=30\)"):
        checkpoints.load()
    assert checkpoints.load(step=30)[1]["step"] == 30


@pytest.mark.parametrize("length", [0, 5, 90, 500])
def test_a_file_that_was_cut_off_is_seen(checkpoints, length):
    for step in (30, 40):
        path = checkpoints.path(step)
        path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="of step 20, is whole"):
        checkpoints.load()


def test_foreign_files_and_formats_are_refused(checkpoints, tmp_path):
    torch.save({"x": 1}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match="is no checkpoint of inloop"):
        read_checkpoint(tmp_path / "theirs.pt")
    later = checkpoints.path(40)
    later.write_bytes(later.read_bytes().replace(b"inloop checkpoint 1", b"inloop checkpoint 9"))
    with pytest.raises(CheckpointError, match="has the format 9; this version of inloop reads 1"):
        read_checkpoint(later)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 99; it has \[20, 30, 40\]"):
        checkpoints.load(step=99)
    lonely = Checkpoints(tmp_path / "lonely")
    assert lonely.load() is None
    lonely.save(1, {})
    lonely.path(1).write_bytes(b"")
    with pytest.raises(CheckpointError, match="There is no whole one before it"):
        lonely.load()


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_loading_executes_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"x": Harmful()}, buffer)
    content = buffer.getvalue()
    header = f"inloop checkpoint 1 {hashlib.sha256(content).hexdigest()}\n".encode()
    (tmp_path / "bad.pt").write_bytes(header + content)
    with pytest.raises(CheckpointError, match="might execute code"):
        read_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("value", [np.float64(0.5), Path("x"), Harmful()])
def test_what_could_not_be_read_is_not_written(checkpoints, value):
    with pytest.raises(CheckpointError, match="other than tensors, numbers"):
        checkpoints.save(50, {"best": value})
    assert checkpoints.load()[0] == 40


def test_a_run_that_has_gone_back(checkpoints):
    assert checkpoints.load(step=20)[0] == 20
    checkpoints.save(25, {"step": 25})
    assert checkpoints.steps() == [20, 25]
    assert checkpoints.load()[0] == 25


SCRIPT = Path(__file__).with_name("killable_run.py")


def start(folder, workers):
    command = [sys.executable, str(SCRIPT), str(folder), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_at_random_moments_equals_the_uninterrupted_one(tmp_path, workers):
    """Bit for bit: parameters, policy, and what was drawn; killed by SIGKILL, which cannot be answered."""
    whole = start(tmp_path / "whole", workers)
    output, errors = whole.communicate(timeout=120)
    assert whole.returncode == 0, errors
    kills, chance = 0, random.Random(workers)
    for _ in range(30):
        process = start(tmp_path / "killed", workers)
        progress = tmp_path / "killed" / "progress"
        before = progress.read_text() if progress.exists() else ""
        deadline = time.monotonic() + 60
        while kills < 5 and time.monotonic() < deadline and process.poll() is None:
            if progress.exists() and progress.read_text() != before:  # it is training
                time.sleep(chance.uniform(0, 0.1))
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        finished, errors = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
    assert kills >= 4
    assert finished == output


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_that_is_no_number_of_a_step_is_refused(tmp_path, step):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {})
    with pytest.raises(UsageError, match="whole numbers from 0"):
        checkpoints.save(step, {})
    assert checkpoints.steps() == [3]


@pytest.mark.parametrize("content", [b"", b"x", pickle.dumps([1])])
def test_a_signed_file_without_a_state_is_refused(tmp_path, content):
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "step-00000001.pt").write_bytes(f"inloop checkpoint 1 {digest}\n".encode() + content)
    with pytest.raises(CheckpointError, match=r"step-00000001.pt"):
        Checkpoints(tmp_path).load()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(UsageError, match=r"model\.pt is a file; a folder is needed"):
        Checkpoints(tmp_path / "model.pt")
