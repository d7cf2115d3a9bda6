"""Records on whole batches against one image and one operation after the other; the transform; wrong input."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from inloop.augment import (
    SPACES,
    AugmentPolicy,
    Space,
    Transform,
    TrivialAugment,
    UniformAugment,
    apply,
    apply_operation,
    make_space,
    register_operation,
)
from inloop.augment.registry import operation_with_code
from inloop.errors import UsageError
from tests.augment.pillow_operations import from_pil, pillow_operation, to_pil
from tests.augment.test_operations import sample_images


def one_by_one(images, actions):
    """By Pillow, in order."""
    height, width = images.shape[2:]
    done = []
    for image, codes, magnitudes, centers in zip(
        images, *(actions[k].tolist() for k in ("operation", "magnitude", "center")), strict=True
    ):
        pil = to_pil(image)
        for code, magnitude, (x, y) in zip(codes, magnitudes, centers, strict=True):
            pil = pillow_operation(pil, operation_with_code(code).name, magnitude, (x * width, y * height))
        done.append(from_pil(pil))
    return torch.stack(done)


@pytest.mark.parametrize("space", sorted(SPACES))
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 12, 20), (3, 9, 7)])
def test_a_batch_equals_pillow_one_image_at_a_time(space, channels, height, width):
    images = sample_images(channels, height, width, n=20)
    before = images.clone()
    actions = AugmentPolicy(space).sample(len(images), torch.Generator().manual_seed(1))
    assert torch.equal(apply(images, actions), one_by_one(images, actions))
    assert torch.equal(images, before)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(5, 24), st.integers(5, 24), st.sampled_from([1, 3]))
def test_any_small_batch_equals_pillow(seed, n, height, width, channels):
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, channels, height, width), generator=g, dtype=torch.uint8)
    actions = AugmentPolicy("wl", numbers=(4,)).sample(n, g)
    assert torch.equal(apply(images, actions), one_by_one(images, actions))


def test_nothing_to_do_no_images_and_other_memory_formats():
    images = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)
    policy = AugmentPolicy("wl")
    assert torch.equal(apply(images, policy.neutral(6)), images)
    assert apply(images[:0], policy.neutral(0)).shape == (0, 3, 8, 8)
    actions = policy.sample(6)
    expected = apply(images, actions)
    assert torch.equal(apply(images.to(memory_format=torch.channels_last), actions), expected)
    assert torch.equal(apply(images[:, :, ::1].flip(3).flip(3), actions), expected)


def test_what_comes_out_can_be_trained_on():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    weight = torch.randn(192, requires_grad=True)
    (apply(images, AugmentPolicy("wl").sample(4)).float().flatten(1) @ weight).sum().backward()
    assert weight.grad is not None
    assert not apply(images, AugmentPolicy("wl").sample(4)).is_inference()


def test_drawn_signs_and_centers_follow_the_generator():
    images = torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8)
    for name in ("rotate", "cutout"):
        a, b, c = (
            apply_operation(images, name, 25, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
        )
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    left = apply_operation(images, "translate_x", 10, sign_N=1)
    right = apply_operation(images, "translate_x", 10, sign_N=-1)
    drawn = apply_operation(images, "translate_x", 10)
    is_left, is_right = ((drawn == side).flatten(1).all(dim=1) for side in (left, right))
    assert bool((is_left | is_right).all())
    assert 10 < int(is_left.sum()) < 54


def test_own_operations_join_a_space():
    register_operation(
        "halve", lambda sound_NT, gain_N: sound_NT * gain_N.to(sound_NT).unsqueeze(1), magnitudes=(1.0, 0.5)
    )
    space = make_space(["identity", "halve"])
    assert space.magnitudes["halve"][0] == 1
    assert space.magnitudes["halve"][30] == 0.5
    sound = torch.ones(3, 10)
    assert apply_operation(sound, "halve", torch.tensor([0, 15, 30]), space)[:, 0].tolist() == [1, 0.75, 0.5]
    assert apply(sound, AugmentPolicy(space, numbers=(1, 2)).sample(3)).shape == (3, 10)
    images = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8)  # beside ours, on images
    register_operation("negative", lambda images, magnitude_N: 255 - images)
    policy = AugmentPolicy(make_space(["identity", "negative", "rotate"]), numbers=(2,))
    assert apply(images, policy.sample(20)).shape == images.shape


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x, m: x[:, :, :-1], r"Operation 'broken' made \[2, 3, 7, 8\]"),
        (lambda x, m: x.double(), "Operation 'broken' made .* torch.float64"),
        (lambda x, m: x * torch.nan, "Operation 'broken' returned values that are not finite"),
        (lambda x, m: None, "Operation 'broken' returned NoneType"),
    ],
)
def test_broken_own_operations_are_named(function, match):
    register_operation("broken", function)
    images = torch.rand(2, 3, 8, 8)
    with pytest.raises(UsageError, match=match):
        apply_operation(images, "broken", 3, make_space(["broken"]))


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (
            torch.linspace(0, 1, 384).view(2, 3, 8, 8),
            r"Operation 'rotate' got torch.float32 from 0 to 1.*round\(\).to\(torch.uint8\)",
        ),
        (torch.zeros(2, 3, 8, 8, dtype=torch.long), "Operation 'rotate' got torch.int64"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), r"Operation 'rotate' got images of shape \[2, 8, 8, 3\]"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), r"Operation 'rotate' got images of shape \[3, 8, 8\]"),
    ],
)
def test_wrong_images(images, match):
    with pytest.raises(UsageError, match=match):
        apply_operation(images, "rotate", 3)
    actions = AugmentPolicy(make_space(["rotate", "identity"]), numbers=(2,)).sample(len(images))
    with pytest.raises(UsageError, match=match):
        apply(images, actions | {"operation": torch.full_like(actions["operation"], 0).fill_(code_of("rotate"))})


def code_of(name):
    from inloop.augment.registry import get_operation

    return get_operation(name).code


def test_other_wrong_input():
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(UsageError, match="Operation 'swirl' is unknown. Known are .*rotate"):
        apply_operation(images, "swirl", 3)
    with pytest.raises(UsageError, match="space='huge': allowed are ra, wl"):
        apply_operation(images, "rotate", 3, space="huge")
    with pytest.raises(UsageError, match="Space 'ra' has no operation 'blur'"):
        apply_operation(images, "blur", 3, space="ra")
    for strength in (31, -1, torch.tensor([3, 40]), 2.5):
        with pytest.raises(UsageError, match="Operation 'rotate': strengths are whole numbers 0..30"):
            apply_operation(images, "rotate", strength)
    with pytest.raises(UsageError, match=r"strength_N has shape \[3\]; give one number, or one for each of 2"):
        apply_operation(images, "rotate", torch.tensor([1, 2, 3]))
    with pytest.raises(UsageError, match="signs are"):
        apply_operation(images, "rotate", 3, sign_N=torch.tensor([1, 0]))
    with pytest.raises(UsageError, match="center_N2 has shape"):
        apply_operation(images, "cutout", 3, center_N2=torch.zeros(2))
    with pytest.raises(UsageError, match="Got 3 actions for 2 images"):
        apply(images, AugmentPolicy().sample(3))
    with pytest.raises(UsageError, match="The actions lack center, magnitude, operation"):
        apply(images, {"number": torch.zeros(2)})
    with pytest.raises(UsageError, match="number 12345, which is not known here"):
        apply(images, AugmentPolicy().neutral(2) | {"operation": torch.full((2, 4), 12345)})
    with pytest.raises(UsageError, match="each only once"):
        make_space(["rotate", "rotate"])
    with pytest.raises(UsageError, match="is one of inloop's own"):
        register_operation("rotate", lambda x, m: x)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_transform_of_a_pil_image_and_of_a_tensor(mode):
    image = to_pil(sample_images(3 if mode == "RGB" else 1, 20, 24, n=1)[0])
    transform = Transform(UniformAugment(), torch.Generator().manual_seed(3))
    done = transform(image)
    assert isinstance(done, Image.Image)
    assert (done.mode, done.size) == (image.mode, image.size)
    again = Transform(UniformAugment(), torch.Generator().manual_seed(3))(from_pil(image))
    assert torch.equal(again, from_pil(done))
    assert transform(torch.zeros(5, 3, 8, 8, dtype=torch.uint8)).shape == (5, 3, 8, 8)
    pickle.loads(pickle.dumps(Transform(TrivialAugment())))(image)  # workers get a copy


def test_transform_refuses_what_it_cannot_do():
    with pytest.raises(UsageError, match="PIL image of mode RGBA"):
        Transform(TrivialAugment())(Image.new("RGBA", (4, 4)))
    with pytest.raises(UsageError, match="got ndarray"):
        Transform(TrivialAugment())(np.zeros((4, 4, 3), dtype=np.uint8))
    with pytest.raises(UsageError, match="takes a policy with sample"):
        Transform("ta")


def test_own_operations_may_return_any_strides_keep_tensors_and_get_no_gradient():
    register_operation(
        "through_numpy",
        lambda images, m: torch.from_numpy(np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())).permute(
            0, 3, 1, 2
        ),
    )
    images = torch.randint(256, (4, 3, 5, 7), dtype=torch.uint8)
    record = AugmentPolicy(make_space(["through_numpy"]), numbers=(1,)).sample(4)
    record["operation"].fill_(code_of("through_numpy"))
    assert torch.equal(apply(images, record), images)

    kept = []
    register_operation("keeps", lambda sound, m: kept.append(sound * 1) or sound * 2)
    record["operation"].fill_(code_of("keeps"))
    sound = torch.ones(4, 6, requires_grad=True)
    doubled = apply(sound, record)
    assert doubled.tolist() == [[2.0] * 6] * 4
    assert not doubled.requires_grad
    assert not kept[0].is_inference()


def test_own_operations_in_place_leave_the_callers_examples_alone():
    register_operation("in_place", lambda sound, m: sound.mul_(3))
    sound = torch.ones(2, 4)
    assert apply_operation(sound, "in_place", 0, make_space(["in_place"])).sum() == 24
    assert sound.sum() == 8


def test_no_images_at_all():
    images = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    for name in SPACES["wl"].operations:
        assert apply_operation(images, name, 5).shape == images.shape
    assert apply(images, AugmentPolicy().sample(0)).shape == images.shape


def test_more_wrong_input():
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(UsageError, match="Images are a tensor"):
        apply_operation(images.numpy(), "rotate", 3)
    with pytest.raises(UsageError, match="sides are 1 to 32767 pixels"):
        apply_operation(torch.zeros(1, 1, 1, 40_000, dtype=torch.uint8), "flip_lr", 3)
    with pytest.raises(UsageError, match=r"expected \[N, R\]"):
        apply(images, AugmentPolicy().sample(2) | {"center": torch.zeros(2, 4)})
    with pytest.raises(UsageError, match="give a name and a function"):
        register_operation("five", 5)
    with pytest.raises(UsageError, match="give two, of strength 0 and of strength 30"):
        register_operation("five", lambda x, m: x, magnitudes=(1.0,))
    with pytest.raises(UsageError, match="give 31 finite magnitudes"):
        Space("short", {"rotate": (1.0, 2.0)})
    with pytest.raises(UsageError, match="Operation 'swirl' is unknown"):
        Space("unknown", {"swirl": (1.0,) * 31})
    assert make_space(["cutout_grey", "cutout_centered"]).magnitudes["cutout_grey"][30] == 0.6
    with pytest.raises(UsageError, match="takes a policy with sample"):
        Transform(TrivialAugment)


def test_a_transform_with_a_generator_is_refused_in_workers():
    from torch.utils.data import DataLoader

    transform = Transform(TrivialAugment(), torch.Generator())
    loader = DataLoader([torch.zeros(3, 8, 8, dtype=torch.uint8)], collate_fn=lambda b: transform(b[0]), num_workers=1)
    with pytest.raises(UsageError, match="would do the same in every worker"):
        next(iter(loader))


def test_an_operation_has_the_same_number_in_every_process():
    """Records are saved in checkpoints."""
    assert (code_of("identity"), code_of("rotate"), code_of("cutout")) == (0, 931746316, 2892378280)
