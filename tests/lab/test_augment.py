"""The augmentation experiment: pipeline, network, recipe, continuation, command line and report."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from inloop.augment import make_space
from inloop.cli import main
from inloop.errors import UsageError
from inloop_lab.augmentation.experiment import AugmentExperiment, choose_images, learning_rate
from inloop_lab.augmentation.pipeline import StandardPipeline, cut_out, normalise_images
from inloop_lab.augmentation.report import PAPER
from inloop_lab.augmentation.settings import PRESETS, AugmentSettings, with_augment_defaults
from inloop_lab.data.digits import load_digits
from inloop_lab.networks.wide_resnet import make_wide_resnet
from inloop_lab.runs.folder import RunFolder
from inloop_lab.runs.seed import train_to_end


@pytest.fixture(scope="module")
def data():
    return load_digits()


def quick(**options):
    return with_augment_defaults("digits", **({"network": "wrn-10-1-s2", "epochs": 2, "batch": 300} | options))


# ------------------------------------------------------------------ pipeline


def test_crop_flip_normalise_against_pillow():
    images = torch.randint(256, (200, 3, 20, 24), dtype=torch.uint8)
    got = StandardPipeline(padding=4, flip=True, cutout=0)(images, torch.Generator().manual_seed(0))
    possible = set()
    for image, result in zip(images[:40], got, strict=False):
        padded = Image.new("RGB", (32, 28))
        padded.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), (4, 4))
        matches = []
        for x in range(9):
            for y in range(9):
                crop = padded.crop((x, y, x + 24, y + 20))
                for mirrored in (False, True):
                    view = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else crop
                    expected = normalise_images(torch.from_numpy(np.array(view)).permute(2, 0, 1).unsqueeze(0))[0]
                    if torch.equal(expected, result):
                        matches.append((x, y, mirrored))
        assert len(matches) == 1
        possible |= set(matches)
    assert {m for _, _, m in possible} == {True, False}
    assert len({x for x, _, _ in possible}) > 5
    assert len({y for _, y, _ in possible}) > 5


def test_normalisation():
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    torch.testing.assert_close(
        normalise_images(images)[0, :, 0, 0], -torch.tensor([0.4914 / 0.2023, 0.4822 / 0.1994, 0.4465 / 0.2010])
    )
    assert normalise_images(images[:, :1]).unique().tolist() == [-1]


@pytest.mark.parametrize(("center", "size"), [((16, 16), (16, 16)), ((0, 31), (8, 9)), ((31, 3), (9, 11))])
def test_cutout_is_clipped_at_the_edges(center, size):
    box = cut_out(torch.ones(1, 3, 32, 32), torch.tensor([center]), 16)[0, 0] == 0
    assert (int(box.any(dim=0).sum()), int(box.any(dim=1).sum())) == size
    assert int(box.sum()) == size[0] * size[1]


# ------------------------------------------------------------------ network and recipe


def test_wide_resnet_is_the_authors():
    model = make_wide_resnet("wrn-28-10", 3, 10)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 12 * 2 + 3
    assert all(conv.bias is not None for conv in convolutions)
    weights = sum(
        p.numel() for name, p in model.named_parameters() if not (name.endswith("bias") and "norm" not in name)
    )
    assert 36.4e6 < weights < 36.6e6
    first = [block for block in model.stages if block.conv2.stride == (2, 2)]
    assert len(first) == 2
    assert all(block.conv1.stride == (1, 1) for block in model.stages)
    assert make_wide_resnet("wrn-16-4", 1, 7)(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert make_wide_resnet("wrn-10-1-s2", 3, 10).stem(torch.randn(1, 3, 32, 32)).shape == (1, 16, 16, 16)
    for name in ("wrn-27-10", "wrn-4-1", "wrn-28", "resnet", "wrn-28-0"):
        with pytest.raises(UsageError, match="allowed are wrn-DEPTH-WIDTH"):
            make_wide_resnet(name, 3, 10)


def test_learning_rate_is_the_papers():
    settings = AugmentSettings()
    assert learning_rate(settings, 0) == 0.05
    assert learning_rate(settings, 2.5) == pytest.approx(0.075)
    assert learning_rate(settings, 5) == 0.1
    assert learning_rate(settings, 200) == pytest.approx(0.05 * (1 + math.cos(math.pi * 195 / 200)))
    assert learning_rate(settings, 200) == pytest.approx(1.5e-4, abs=1e-5)


def test_presets_are_the_papers_recipe():
    assert set(PRESETS) == {f"paper-{data}-{space}" for data in ("cifar10", "cifar100") for space in ("wl", "ra")}
    settings = with_augment_defaults(**PRESETS["paper-cifar100-wl"])
    assert (settings.data, settings.space, settings.network) == ("cifar100", "wl", "wrn-28-10")
    assert (settings.batch, settings.epochs, settings.warmup, settings.cutout) == (256, 200, 5, 16)
    assert (settings.learning_rate, settings.weight_decay, settings.clip) == (0.1, 5e-4, 5.0)
    assert (settings.interleave, settings.accumulate, settings.policy_learning_rate) == (True, 1, 0.1)
    assert PAPER["cifar100", "ola", "wl"] == (84.30, 0.40)


def test_clipping_comes_after_the_reward(data):
    """With a tiny clip the rewards stay, the update does not."""
    seen = {}
    for clip in (5.0, 1e-9):
        experiment = AugmentExperiment(quick(clip=clip), data, 0)
        rewards = []
        experiment.learner.callbacks = [lambda report, rewards=rewards: rewards.append(report.reward_mean)]
        before = experiment.model.linear.weight.detach().clone()
        for _ in range(2):
            experiment.train_step(data.train_x[:300], data.train_y[:300], 0.0)
        seen[clip] = rewards[1]
        assert torch.equal(before, experiment.model.linear.weight)
    assert seen[5.0] == seen[1e-9] != 0


def test_images_are_chosen_class_by_class_and_validation_is_apart(data):
    settings = quick(examples=500, validation=200, batch=50)
    (train_x, train_y), (held_x, _) = choose_images(data, settings)
    shares = torch.bincount(data.train_y) / len(data.train_y)
    torch.testing.assert_close(torch.bincount(train_y) / 500, shares, atol=0.003, rtol=0)
    assert len(held_x) == 200
    seen = {x.numpy().tobytes() for x in train_x}
    assert sum(x.numpy().tobytes() in seen for x in held_x) == 0
    with pytest.raises(UsageError, match="there are 1500 training images"):
        choose_images(data, quick(examples=1400, validation=200))
    with pytest.raises(UsageError, match="two batches must be filled"):
        choose_images(data, quick(examples=500, batch=300))
    with pytest.raises(UsageError, match="two batches must be filled without the held-out tenth"):
        choose_images(data, quick(examples=600, batch=300, reference="heldout"))
    with pytest.raises(UsageError, match="cutout=8 would blank images of 8 pixels"):
        choose_images(data, quick(cutout=8))


def test_classes_keep_their_shares_in_every_part(data):
    from dataclasses import replace

    from inloop_lab.augmentation.experiment import hold_out

    rare = torch.cat([torch.arange(900), 900 + torch.arange(100)])
    two = replace(data, train_x=data.train_x[rare], train_y=(rare >= 900).long(), num_classes=2)
    (train, held) = choose_images(two, quick(examples=500, validation=200, batch=100))
    assert torch.bincount(held[1]).tolist() == [180, 20]
    assert torch.bincount(train[1]).tolist() == [450, 50]
    assert torch.bincount(hold_out(train)[1][1]).tolist() == [45, 5]


def test_held_out_images_do_not_enter_the_running_statistics(data):
    experiment = AugmentExperiment(quick(reference="heldout"), data, 0)
    for _ in range(4):
        experiment.train_step(data.train_x[:300], data.train_y[:300], 0.1)
    assert experiment.model.norm.num_batches_tracked == 4


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("augment", ["ola", "ua", "ra", "ta", "aa", "fast-aa", "pba", "none"])
def test_every_augmentation_trains(augment, data):
    colour = data if augment in ("ola", "none") else _in_colour(data)
    result = train_to_end(lambda: AugmentExperiment(quick(augment=augment, epochs=1), colour, 0))
    assert 0 <= result["test_accuracy"] <= 1
    assert result["space"] == ("wl" if augment in ("ola", "ua", "ra", "ta") else None)
    assert ("keep" in result["epochs"][0]) == (augment == "ola")


def _in_colour(data):
    from dataclasses import replace

    return replace(data, train_x=data.train_x.repeat(1, 3, 1, 1), test_x=data.test_x.repeat(1, 3, 1, 1))


def test_runs_with_the_same_seed_are_paired(data):
    """Same network, same order, same crops, whatever the augmentation."""
    none, ola = (AugmentExperiment(quick(augment=augment), data, 4) for augment in ("none", "ola"))
    for a, b in zip(none.model.parameters(), ola.model.parameters(), strict=True):
        assert torch.equal(a, b)
    seen = []
    for experiment in (none, ola):
        experiment.pipeline = lambda images, generator, seen=seen: (
            seen.append(torch.rand(3, generator=generator)) or StandardPipeline(1, False, 0)(images, generator)
        )
        experiment.train_epoch()
    for a, b in zip(seen[:5], seen[5:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options", [{}, {"reference": "heldout"}, {"interleave": False, "accumulate": 2}, {"augment": "ua"}]
)
def test_an_interrupted_run_continues_bit_for_bit(options, data, tmp_path):
    settings = quick(epochs=3, batch=400, **options)

    def make():
        return AugmentExperiment(settings, data, 1)

    whole = _without_time(train_to_end(make))
    folder = RunFolder(tmp_path / "run", "augment", settings.as_dict()).seed(1)

    def stop(progress):
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_to_end(make, folder, stop)
    assert folder.result() is None
    assert _without_time(train_to_end(make, folder)) == whole
    assert _without_time(train_to_end(make, folder, stop)) == whole  # finished: nothing is done again


def _without_time(result):
    return result | {"epochs": [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in result["epochs"]]}


@pytest.mark.parametrize(
    "options",
    [
        {"start": 1},
        {"layers": "linear"},
        {"accumulate": 3},
        {"policy_learning_rate": 0.01},
        {"interleave": False},
        {"reference": "heldout"},
        {"normalisation": "center"},
    ],
)
def test_every_option_of_the_learner_matters(options, data):
    usual, other = (train_to_end(lambda s=s: AugmentExperiment(s, data, 0)) for s in (quick(), quick(**options)))
    assert usual["epochs"][-1]["keep"] != other["epochs"][-1]["keep"]


def test_own_operations_can_be_tried(data):
    space = make_space(["identity", "flip_ud", "rotate", "invert"])
    result = train_to_end(lambda: AugmentExperiment(quick(), data, 0, space))
    assert result["operations"] == list(space.operations)


# ------------------------------------------------------------------ command line and report


def run_cli(capsys, *arguments):
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


QUICK = ("--network", "wrn-10-1-s2", "--epochs", "2", "--batch", "300", "--seeds", "2")


def test_the_command_prints_one_json_object_and_continues(tmp_path, capsys):
    out = str(tmp_path / "run")
    code, printed, _ = run_cli(capsys, "run", "augment", *QUICK, "--out", out, "--json")
    assert code == 0
    summary = json.loads(printed)
    assert list(summary) == ["data", "network", "augment", "space", "test_accuracy", "interval", "results"]
    assert (summary["data"], summary["augment"], summary["space"], len(summary["results"])) == (
        "digits",
        "ola",
        "wl",
        2,
    )
    assert summary["test_accuracy"] == pytest.approx(np.mean([r["test_accuracy"] for r in summary["results"]]))
    assert json.loads(run_cli(capsys, "run", "augment", *QUICK, "--out", out, "--json")[1]) == summary
    code, printed, error = run_cli(capsys, "run", "augment", *QUICK, "--out", out, "--space", "ra")
    assert code == 1
    assert "belongs to another run" in error
    assert "kept with probability" in run_cli(capsys, "run", "augment", *QUICK, "--out", out)[1]


def test_runs_from_before_a_setting_existed_are_continued_and_reported(tmp_path, capsys):
    arguments = ("run", "augment", *QUICK, "--augment", "none", "--out", str(tmp_path / "run"), "--json")
    summary = run_cli(capsys, *arguments)[1]
    file = tmp_path / "run" / "settings.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "normalisation"}))
    assert run_cli(capsys, *arguments)[1] == summary
    assert run_cli(capsys, "report", str(tmp_path))[0] == 0
    (tmp_path / "run" / "seed-1" / "result.json").write_text("{}")
    code, _, error = run_cli(capsys, "report", str(tmp_path))
    assert code == 1
    assert "is no result of a seed" in error


def test_runs_with_different_recipes_are_not_compared(tmp_path, capsys):
    for warmup in ("1", "2"):
        for augment in ("none", "ua"):
            out = str(tmp_path / f"{augment}-{warmup}")
            run_cli(capsys, "run", "augment", *QUICK, "--augment", augment, "--warmup", warmup, "--out", out, "--json")
    run_cli(capsys, "report", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2>") == 2
    assert "after 1 epochs" in page
    assert "after 2 epochs" in page


def test_folders_are_named_after_what_is_unusual():
    digits, cifar10, own = (with_augment_defaults(name, side=16) for name in ("digits", "cifar10", "own.npz"))
    assert digits.folder_name(digits) == "augment-digits-wrn-10-1-ola-wl"
    assert with_augment_defaults("digits", epochs=3).folder_name(digits) == "augment-digits-wrn-10-1-ola-wl-epochs-3"
    assert "warmup-4" in with_augment_defaults("cifar10", epochs=80, warmup=4).folder_name(cifar10)
    assert own.folder_name(own) == "augment-own-wrn-28-10-ola-wl"
    assert replace(own, augment="aa").folder_name(own) == "augment-own-wrn-28-10-aa"


def test_small_images_of_ones_own_get_a_smaller_crop_and_cutout():
    settings = with_augment_defaults("own.npz", side=12)
    assert (settings.padding, settings.cutout) == (1, 6)
    assert (with_augment_defaults("own.npz", side=224).padding, with_augment_defaults("own.npz", side=224).cutout) == (
        4,
        16,
    )


def test_a_validation_run_has_no_test_accuracy(tmp_path, capsys):
    arguments = (
        "run",
        "augment",
        *QUICK,
        "--augment",
        "none",
        "--examples",
        "600",
        "--validation",
        "300",
        "--out",
        str(tmp_path / "v"),
        "--json",
    )
    summary = json.loads(run_cli(capsys, *arguments)[1])
    assert summary["test_accuracy"] is None
    assert 0 < summary["validation_accuracy"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--network", "wrn-12-1"), "allowed are wrn-DEPTH-WIDTH"),
        (("--batch", "1"), "batch=1: allowed are numbers from 2"),
        (("--ra-strength", "31"), "ra_strength=31: allowed are 0..30"),
        (("--seeds", "0"), "--seeds 0"),
        (("--learning-rate", "0"), "learning_rate=0.0: allowed are numbers above 0"),
        (("--examples", "5000"), "there are 1500 training images"),
        (("--learning-rate", "nan"), "learning_rate=nan: allowed are finite numbers"),
        (("--start", "40"), "start=40: the policy would not move in 40 epochs"),
        (("--cutout", "8"), "cutout=8 would blank images of 8 pixels"),
        (("--augment", "aa", "--space", "ra"), "--space does nothing with --augment aa"),
        (("--augment", "ua", "--accumulate", "2"), "--accumulate does nothing with --augment ua; it is for ola"),
    ],
)
def test_wrong_usage(arguments, message, tmp_path, capsys):
    code, _, error = run_cli(capsys, "run", "augment", *arguments, "--out", str(tmp_path / "run"))
    assert code == 2
    assert message in error
    assert not (tmp_path / "run").exists()


def test_the_report_shows_table_2_differences_and_the_policy(tmp_path, capsys):
    for augment in ("none", "ua", "ola"):
        run_cli(
            capsys, "run", "augment", *QUICK, "--augment", augment, "--out", str(tmp_path / f"{augment}<b>"), "--json"
        )
    assert run_cli(capsys, "report", str(tmp_path))[0] == 0
    page = (tmp_path / "report.html").read_text()
    for text in (
        "OLA (WL)",
        "UA baseline",
        "against ua",
        "kept with probability",
        "epoch 2",
        "raw",
        "Training images under the policy",
    ):
        assert text in page
    assert "ola&lt;b&gt;" in page
    assert "<b>" not in page
    assert len(list(tmp_path.glob("report-augment-1-ola-1-*.png"))) == 3
