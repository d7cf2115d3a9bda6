"""Rules of alignment: which layers keep one, and how users register their own."""

import pytest
import torch
from torch import nn

from inloop import alignment_rule
from inloop.alignment import affine_in_parameters, linear_in_parameters
from inloop.alignment.rules import _RULES
from tests.alignment.exactness import assert_exact, rule_names, x


def test_a_subclass_that_changes_nothing_keeps_its_rule():
    class Named(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)

        def extra_repr(self):
            return "named"

    assert rule_names(Named()) == {"": "align_linear"}


@pytest.fixture
def _registry():
    saved = dict(_RULES)
    yield
    _RULES.clear()
    _RULES.update(saved)


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.rand(5))

    def forward(self, batch):
        return batch + self.shift


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(5))

    def forward(self, batch):
        return batch * self.gain


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.shift = nn.Parameter(torch.rand(5))

    def forward(self, batch):
        return batch * self.scale.exp() + self.shift


@pytest.mark.usefixtures("_registry")
def test_users_register_rules_for_their_layers():
    alignment_rule(Affine, parameters=("shift",))(affine_in_parameters)
    alignment_rule(Gain, parameters=("gain",))(linear_in_parameters)

    @alignment_rule(Scale, parameters=("scale", "shift"), keeps_parameters=True)
    def align_scale(call, direction):
        (batch,) = call.args
        return call.dot(batch * call.layer.scale.exp() * direction["scale"] + direction["shift"])

    model = nn.Sequential(Affine(), Gain()).double()
    assert rule_names(model) == {"0": "affine_in_parameters", "1": "linear_in_parameters"}
    assert_exact(model, x(5))
    assert rule_names(Scale()) == {"": "align_scale"}
    assert_exact(Scale().double(), x(5))


@pytest.mark.usefixtures("_registry")
def test_a_rule_that_keeps_no_parameters_cannot_read_those_of_the_next_step():
    @alignment_rule(Gain, parameters=("gain",))
    def reads_what_it_did_not_keep(call, direction):
        return call.dot(call.args[0] * direction["gain"] * call.layer.gain)

    with pytest.raises(RuntimeError, match="meta"):
        assert_exact(Gain().double(), x(5))


@pytest.mark.usefixtures("_registry")
def test_a_wrong_rule_does_not_pass_verification():
    from inloop.errors import VerificationError

    alignment_rule(Affine, parameters=("shift",))(linear_in_parameters)
    with pytest.raises(VerificationError, match="'0.shift'"):
        assert_exact(nn.Sequential(Affine(), nn.Linear(5, 2)).double(), x(5))


class OurRMSNorm(nn.Module):
    """Known by its name alone, as those of Hugging Face."""

    __module__ = "transformers.models.ours"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def forward(self, batch):
        return self.normalized(batch) * (1 + self.weight)

    def normalized(self, batch):
        return batch * torch.rsqrt(batch.square().mean(-1, keepdim=True) + 1e-6)


class ScalesBeforeItNormalizesRMSNorm(OurRMSNorm):
    __module__ = "transformers.models.ours"

    def forward(self, batch):
        return self.normalized(batch * (1 + self.weight))


class NeedsAGateRMSNorm(OurRMSNorm):
    __module__ = "transformers.models.ours"

    def forward(self, batch, gate):
        return super().forward(batch * gate)


def test_a_norm_that_is_known_by_its_name_has_a_rule_only_if_it_is_affine():
    assert rule_names(OurRMSNorm()) == {"": "affine_in_parameters"}
    assert rule_names(ScalesBeforeItNormalizesRMSNorm()) != {"": "affine_in_parameters"}
    for make in (OurRMSNorm, ScalesBeforeItNormalizesRMSNorm):
        assert_exact(nn.Sequential(nn.Linear(5, 5), make(), nn.Linear(5, 2)).double(), x(5))


class LimitedRMSNorm(OurRMSNorm):
    __module__ = "transformers.models.ours"

    def forward(self, batch):
        return self.normalized(batch) * self.weight.clamp(max=10)


class ScalesPositionsFirstRMSNorm(OurRMSNorm):
    __module__ = "transformers.models.ours"

    def forward(self, batch):
        return self.normalized(batch * self.weight) if batch.dim() > 2 else super().forward(batch)


@pytest.mark.parametrize("make", [LimitedRMSNorm, ScalesPositionsFirstRMSNorm])
def test_a_norm_that_is_affine_for_some_numbers_only_is_run_again(make):
    assert rule_names(make()) != {"": "affine_in_parameters"}
    model = nn.Sequential(nn.Linear(5, 5), make(), nn.Linear(5, 2)).double()
    assert_exact(model, torch.randn(5, 3, 5, dtype=torch.float64))


class DropsRMSNorm(OurRMSNorm):
    __module__ = "transformers.models.ours"

    def forward(self, batch):
        return nn.functional.dropout(super().forward(batch), 0.5)


def test_trying_a_norm_leaves_the_generators_alone():
    model = DropsRMSNorm()
    before = torch.get_rng_state()
    rule_names(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_norm_that_cannot_be_tried_is_run_again():
    assert rule_names(NeedsAGateRMSNorm()) != {"": "affine_in_parameters"}
    assert_exact(NeedsAGateRMSNorm().double(), x(5), x(5))
