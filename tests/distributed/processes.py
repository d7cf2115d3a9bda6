"""Runs a function in several processes that form a gloo group, and returns what each of them returned."""

import io
import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "inloop", "torch.distributed.fsdp"])


def run(world_size, function, *args, timeout=120, group_timeout=60):
    """``[function(*args) in process 0, ...]``; None for a process that ended without a word."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_enter,
                args=(sender, rank, world_size, Path(folder) / "store", group_timeout, function, packed(args)),
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = [_receive(pipe, timeout) for pipe in pipes]
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    if failed := [text for kind, text in results if kind == "failed"]:
        raise AssertionError("\n\n".join(failed))
    return [value for _, value in results]


def _receive(pipe, timeout):
    try:
        kind, value = pipe.recv() if pipe.poll(timeout) else ("failed", f"no answer within {timeout} s")
        return kind, unpacked(value) if kind == "returned" else value
    except EOFError:
        return "ended", None


def packed(value):
    """As bytes: tensors would be shared between processes, of which one may have ended."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content):
    return torch.load(io.BytesIO(content), weights_only=False)


def _enter(pipe, rank, world_size, store, group_timeout, function, args):
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of workers of loaders, as in a process of one's own
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        pipe.send(("returned", packed(function(*unpacked(args)))))
        dist.destroy_process_group()
    except BaseException:
        pipe.send(("failed", f"process {rank}:\n{traceback.format_exc()}"))
