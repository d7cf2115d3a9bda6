"""The examples do what they say. (Those that need a trainer are in tests/integrations.)"""

import pytest

from inloop.alignment.rules import _RULES
from tests.documents.loading import ROOT, load_file


def load(name):
    return load_file(ROOT / "examples" / f"{name}.py")


def test_find_bad_source(capsys):
    shares = load("find_bad_source").main()
    assert shares[3] < 0.02
    assert "test accuracy 0.9" in capsys.readouterr().out


def test_target_set():
    _upright, turned, _random = load("target_set").main().tolist()
    assert turned > 0.7


def test_own_layer_rule():
    saved = dict(_RULES)
    try:
        without, with_rule = load("own_layer_rule").main()
    finally:
        _RULES.clear()
        _RULES.update(saved)
    assert without.ok
    assert with_rule.ok
    assert "run again" in without.rows[0].rule
    assert with_rule.rows[0].rule == "CircularConvolution"


def test_own_policy():
    shares = load("own_policy").main()
    assert shares[9] > 0.2 > 0.05 > shares[0]


def test_example_weights():
    learned, wrong = load("example_weights").main(steps=250)
    assert learned[wrong].mean() < 0.6 < learned[~wrong].mean()


def test_label_smoothing():
    clean, noisy = load("label_smoothing").main(seed=0)
    assert noisy > 2 * clean


def test_learn_augmentation():
    keep = load("learn_augmentation").main(steps=300)
    assert max(keep["flip_ud"], keep["invert"], keep["blot"]) < 0.1
    assert min(keep["identity"], keep["auto_contrast"], keep["sharpness"]) > 0.1


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_each_is_shown_and_tested(path):
    assert f"{{literalinclude}} ../examples/{path.name}" in (ROOT / "docs/examples.md").read_text()
    tests = [ROOT / "tests/documents/test_examples.py", ROOT / "tests/documents/test_pages.py"]
    tests.append(ROOT / "tests/integrations/test_examples.py")
    assert any(path.stem in test.read_text() for test in tests)
