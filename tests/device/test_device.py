"""The pretend device itself: what the other tests in this folder rely on."""

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.device.pretend_cuda.watching import graph_capture, host_synchronisations, races


def test_tensors_and_modules_are_on_the_device():
    x = torch.randn(3, 4, device="cuda")
    out = nn.Linear(4, 2).cuda()(x)
    assert str(x.device) == str(out.device) == "cuda:0"
    assert torch.cuda.is_available()
    torch.testing.assert_close(x.cpu().sum(0), x.sum(0).cpu())


def test_tensors_on_different_devices_do_not_go_together():
    x = torch.ones(3, device="cuda")
    torch.testing.assert_close((x * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))  # a number may come from anywhere
    for use in (lambda: x + torch.ones(3), lambda: torch.ones(3).add_(x), lambda: nn.Linear(3, 1)(x)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            use()
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()


def test_a_backward_pass_runs_on_a_thread_of_its_own():
    threads, x = [], torch.ones(3, device="cuda", requires_grad=True)
    x.register_hook(lambda _: threads.append(threading.get_ident()))
    (2 * x).sum().backward()
    assert threads != [threading.get_ident()]
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_the_device_draws_from_its_own_generator():
    torch.manual_seed(0)
    of_cpu = torch.get_rng_state()
    first = F.dropout(torch.ones(50, device="cuda"))
    assert torch.equal(of_cpu, torch.get_rng_state())
    state = torch.cuda.get_rng_state()
    second = F.dropout(torch.ones(50, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, F.dropout(torch.ones(50, device="cuda")))
    assert not torch.equal(first, second)
    generator = torch.Generator("cuda").manual_seed(1)
    assert generator.device == first.device
    assert torch.rand(2, generator=generator, device="cuda").is_cuda
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.rand(2, generator=generator)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(2, generator=torch.Generator(), device="cuda")


def waits(use):
    with host_synchronisations() as counted:
        use()
    return [event.what for event in counted]


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda x: x.sum().item(), ["item"]),
        (lambda x: bool((x > 0).all()), ["item"]),
        (lambda x: torch.equal(x, x), ["equal"]),
        (lambda x: x.tolist(), ["copy to the CPU"]),
        (lambda x: x.cpu(), ["copy to the CPU"]),
        (lambda x: ONES.clone().copy_(x), ["copy to the CPU"]),
        (lambda x: x.nonzero(), ["nonzero"]),
        (lambda x: x[x > 0], ["nonzero"]),
        (lambda x: x[torch.tensor([0])], ["copy to the device"]),
        (lambda x: x.long().flatten().bincount(), ["bincount"]),
        (lambda x: torch.tensor([1.0], device="cuda"), ["copy to the device"]),
        (lambda x: ONES.to("cuda", non_blocking=True), []),
        (lambda x: torch.ones(1 << 15).to("cuda", non_blocking=True), ["copy to the device"]),
        (lambda x: torch.ones(1 << 15).pin_memory().to("cuda", non_blocking=True), []),
        (lambda x: ONES.clone().copy_(x, non_blocking=True), ["copy to the CPU"]),
        (lambda x: x.to("cpu", non_blocking=True), []),  # into pinned memory
        (lambda x: torch.cuda.synchronize(), ["synchronize of the device"]),
        (lambda x: torch.cuda.current_stream().synchronize(), ["synchronize of a stream"]),
        (lambda x: torch.cuda.current_stream().record_event().synchronize(), ["synchronize of an event"]),
        (lambda x: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), []),
        (lambda x: x.clone().masked_fill_(x > 0, 2.0), []),
        (lambda x: x.clone().__setitem__(x > 0, 2.0), []),
        (lambda x: torch.where(x > 0, x, 0.0)[0, 1:].max(dim=0), []),
        (lambda x: nn.Linear(4, 2, device="cuda")(x).sum().backward(), []),
    ],
)
def test_it_is_counted_where_the_host_waits(use, expected):
    x = ONES.cuda()
    assert waits(lambda: use(x)) == expected


def test_a_wait_says_where():
    x = torch.ones(2, device="cuda", requires_grad=True)

    def read(gradient):
        gradient.sum().item()

    y = 2 * x
    y.register_hook(read)
    with host_synchronisations() as counted:
        y.sum().backward()
    assert "in read: gradient.sum().item()" in counted[0].stack[-1]  # on the thread of the backward pass
    assert str(counted).startswith("1. item\n    test_device.py:")


def test_streams_race_unless_they_wait():
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with races() as found:
        y = x * 2
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            y * 2
    (race,) = found
    assert race.what == f"mul on stream {side.stream_id} reads memory that stream 0 may not have written yet"
    with races() as found:
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y * 2
        torch.cuda.current_stream().wait_event(side.record_event())
        z * 2
    assert not found, str(found)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_uses_is_kept_by_record_stream(recorded):
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with races() as found:
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y * 2
        if recorded:
            y.record_stream(side)
        del y
        x * 3
    assert len(found) == (0 if recorded else 1)
    assert recorded or "still uses, freed at test_device.py" in found[0].what


def test_autocast_and_a_scaler_work():
    layer, x = nn.Linear(4, 2, device="cuda"), torch.randn(3, 4, device="cuda")
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype=dtype):
            assert layer(x).dtype == dtype
    scaler.scale(layer(x).sum()).backward()
    assert waits(lambda: scaler.step(optimizer)) == ["item"]
    scaler.update()


def error_of_product(dtype):
    x = torch.randn(8, 8)
    return float((x.to("cuda", dtype) @ x.to("cuda", dtype) - (x @ x).cuda()).abs().max())


def test_matrix_products_are_exact_unless_tf32_is_allowed():
    assert error_of_product(torch.float32) < 1e-5


def test_tf32_rounds_the_arguments_of_matrix_products(tf32):
    assert 1e-5 < error_of_product(torch.float32) < 1e-2
    assert error_of_product(torch.float64) < 1e-5


def test_tensors_on_the_device_are_copied_and_saved():
    x = torch.randn(3, device="cuda")
    saved = io.BytesIO()
    torch.save(x, saved)
    for location, device in ((None, "cuda:0"), ("cpu", "cpu")):
        saved.seek(0)
        loaded = torch.load(saved, map_location=location)
        assert str(loaded.device) == device
        assert torch.equal(loaded.cpu(), x.cpu())
    assert torch.equal(copy.deepcopy(x), x)


def test_the_host_must_not_wait_while_a_graph_is_captured():
    x = torch.ones(3, device="cuda")
    with graph_capture():
        assert torch.cuda.is_current_stream_capturing()
        x * 2
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            x.sum().item()
    assert not torch.cuda.is_current_stream_capturing()


def test_the_bytes_of_tensors_are_counted():
    before = torch.cuda.memory_allocated()
    x = torch.ones(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4000
    torch.cuda.reset_peak_memory_stats()
    y = 2 * x
    del y
    assert torch.cuda.memory_allocated() == before + 4000
    assert torch.cuda.max_memory_allocated() == before + 8000
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before + 4000


def test_torchs_own_warning_of_waits():
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            x.sum().item()
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x.sum().item()
