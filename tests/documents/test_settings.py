"""The comparison of the runs in results/settings."""

import pytest

from tests.documents.loading import ROOT, load_file

compare = load_file(ROOT / "results/settings/compare.py")


def rows(setting, arm, scores, wrong=(0,), words=(), worst=0.0):
    return [
        {"setting": setting, "arm": arm, "seed": seed, "score": score, "wrong": list(wrong), "words": list(words)}
        | {"scores": {"one": score, "other": score - worst}}
        for seed, score in enumerate(scores)
    ]


def test_gains_are_paired_by_seed_and_more_is_better():
    runs = compare.Runs(
        rows("c three of ten", "uniform", [0.50, 0.60, 0.55])
        + rows("c three of ten", "default", [0.51, 0.62])
        + rows("k text and garbage", "uniform", [2.2])
        + rows("k text and garbage", "default", [2.1])
    )
    assert runs.gain("c three of ten", "default").values == pytest.approx([1.0, 2.0])
    assert runs.gain("k text and garbage", "default").mean == pytest.approx(0.1)
    assert runs.gain("c three of ten", "paper") is None


def test_the_share_of_the_oracle_only_where_it_certainly_gains():
    uniform = rows("c three of ten", "uniform", [0.5, 0.5, 0.5])
    own = rows("c three of ten", "default", [0.52, 0.53, 0.54])
    certain = rows("c three of ten", "oracle 0", [0.55, 0.56, 0.57])
    assert compare.Runs(uniform + own + certain).share_of_oracle("c three of ten", "default") == pytest.approx(0.5)
    uncertain = rows("c three of ten", "oracle 0", [0.45, 0.56, 0.57])
    assert compare.Runs(uniform + own + uncertain).share_of_oracle("c three of ten", "default") is None


def test_holm_is_stricter_than_one_interval():
    """Of twenty gains one is certain by itself at 95%; it is not among twenty."""
    certain, noise = compare.Gain([1.0, 1.2, 0.8, 1.1, 0.9]), compare.Gain([1.0, -1.0, 0.5, -0.5, 0.1])
    borderline = compare.Gain([1.0, 0.2, 1.5, 0.1, 0.9])
    assert borderline.excludes_zero()
    gains = {"borderline": borderline} | {str(k): noise for k in range(19)}
    assert compare.differing_after_holm(gains) == set()
    assert compare.differing_after_holm({"certain": certain, **gains}) == {"certain"}


def test_flags_and_false_alarms():
    runs = compare.Runs(
        rows("c three of ten", "default", [0.5], wrong=(0, 1), words=["??.", "bd."])
        + rows("c three of ten", "default", [0.5], wrong=(0, 1), words=["fb?", "bb?"])
        + rows("c three of ten", "default", [0.5], wrong=(0, 1), words=["..f", "b.."])
    )
    assert runs.found("c three of ten", "default", "fbd") == (2, 3)
    assert runs.found("c three of ten", "default", "b") == (1, 3)
    assert runs.false_alarms("c three of ten", "default") == (1, 3)
    assert runs.first_flag("c three of ten", "default") == 150


def test_marks():
    found = rows("b group norm", "default", [0.46, 0.46, 0.46, 0.47], words=["?"])
    runs = compare.Runs(rows("b group norm", "uniform", [0.5] * 4) + found)
    assert compare.missed_marks(runs, "default") == [
        "b group norm: worse than equal shares by 3.75",
        "b group norm: flagged in 0 of 4 runs",
        "b group norm: called bad in 0 of 4 runs",
    ]
