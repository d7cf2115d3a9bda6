"""Mistakes in a training loop end in an error that says what to do; what only looks like one does not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, MixturePolicy, refusals
from inloop.errors import BatchSizeError, UnsupportedLayerError, UsageError, VerificationError
from tests.alignment.architectures import UnseenProduct
from tests.learners import make_learner
from tests.training import Run, make_net, make_sources, num_hooks

# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "best"}, "reward='best': allowed are 'gar', 'nslr', 'loss'"),
        ({"reference": "last"}, "reference='last': allowed are 'next', 'previous', 'other half', 'trail', a function"),
        ({"reference": "previous", "reward": "nslr"}, "is a gradient, of which NextStepLoss makes no use"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"normalisation": "all"}, "normalisation='all'"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"layers": ["nope"]}, "names 'nope'"),
        ({"verify": "always"}, "verify='always': allowed are 'first', True and False"),
        ({"start_after": -1}, "start_after=-1"),
        ({"update": "x"}, "update='x': allowed are an inloop.updates.Update, False .* and None"),
        ({"update": True}, "update=True: allowed are"),
        ({"callback": [print, 3]}, "allowed are a function of a StepReport, and a list of them"),
        (
            {"optimizer": torch.optim.SGD(make_net().parameters())},
            "must hold the policy's parameters and no others",
        ),
    ],
)
def test_bad_arguments_are_named_and_leave_no_hooks(options, message):
    net = make_net()
    with pytest.raises(UsageError, match=message):
        make_learner(net, MixturePolicy(3), **options)
    assert num_hooks(net) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": {}}, "record={}: allowed is an inloop.Recording"),
        ({"part": "half"}, "part='half': allowed are numbers"),
        ({"generator": 3}, "generator=3: allowed is a torch.Generator"),
        ({"reference": (torch.zeros(9), torch.zeros(9))}, "reference=a tuple: allowed are .*lambda: F.cross_entropy"),
    ],
)
def test_options_of_the_wrong_kind_are_named(options, message):
    net = make_net()
    with pytest.raises(UsageError, match=message):
        InLoop(net, MixturePolicy(3), **options)
    assert num_hooks(net) == 0


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"loss": {"loss": 1.0}}, "a loss that is a dict; .* give output.loss"),
        ({"scaler": "x"}, "scaler is a str; allowed are None and a torch.amp.GradScaler"),
        ({"logits": {"logits": 1}, "labels": torch.zeros(2)}, "logits that are a dict; .* give output.logits"),
    ],
)
def test_what_a_step_is_told_must_be_of_the_right_kind(told, message):
    run = Run()
    run.learner.sample(2)
    with pytest.raises(UsageError, match=message):
        run.learner.step(**{"loss": 1.0, **told})


def test_arguments_of_the_wrong_kind_are_named():
    with pytest.raises(UsageError, match=r"InLoop\(MixturePolicy, Sequential\): the first argument is the model"):
        InLoop(MixturePolicy(3), make_net())
    with pytest.raises(UsageError, match=r"a loss of shape \(2,\); the step's scalar loss is needed"):
        run = Run()
        run.learner.sample(2)
        run.learner.step(torch.zeros(2))
    with pytest.raises(UsageError, match="no state of an InLoop learner: it has no"):
        Run().learner.load_state_dict(make_net().state_dict())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reward": "nslr", "normalisation": "step"}, "normalisation='step' leaves nothing"),
        ({"reward": "nslr", "normalisation": "center"}, "normalisation='center' leaves nothing"),
        ({"reward": "nslr", "part": 0.5}, "part= is about recorded layers, of which NextStepLoss"),
        ({"reward": "loss", "layers": ["0"]}, "layers= is about recorded layers, of which ExampleLoss"),
        ({"reward": "nslr", "retain": "half"}, "retain= is about recorded layers"),
    ],
)
def test_options_that_a_reward_makes_no_use_of_are_refused(options, named):
    with pytest.raises(UsageError, match=named):
        Run(**options)


def test_a_layer_that_is_refused_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.EmbeddingBag(4, 4, mode="sum", scale_grad_by_freq=True))
    with pytest.raises(UnsupportedLayerError, match=r"'1' \(EmbeddingBag\)"):
        InLoop(model, MixturePolicy(3))
    assert num_hooks(model) == 0


def test_batchnorm_is_warned_of_once(caplog):
    refusals.warn_once.cache_clear()
    for _ in range(2):
        InLoop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), MixturePolicy(2)).close()
    assert len([line for line in caplog.messages if "mixes the examples" in line]) == 1
    refusals.warn_once.cache_clear()
    InLoop(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), MixturePolicy(2)).close()
    assert len([line for line in caplog.messages if "mixes the examples" in line]) == 1


# ------------------------------------------------------------------ the loop


def test_step_without_sample():
    run = Run()
    F.cross_entropy(run.model(run.sources[0][0]), run.sources[0][1]).backward()
    with pytest.raises(UsageError, match=r"without actions. Fix: call learner.sample\(n\)"):
        run.learner.step(1.0)


def test_step_before_backward():
    run = Run()
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y)
    with pytest.raises(UsageError, match=r"Fix: call loss.backward\(\) before it"):
        run.learner.step(loss)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_too_early(set_to_none):
    run = Run().train(2)
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y)
    loss.backward()
    run.optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(UsageError, match=r"cleared before learner.step. Fix: call optimizer.zero_grad\(\) after"):
        run.learner.step(loss)


def test_gradients_that_are_cleared_between_passes_are_refused():
    run = Run(verify=False).train(2)
    run.learner.sample(8)
    for _ in range(2):  # as a closure of LBFGS does
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(torch.randn(8, 16)), torch.randint(3, (8,)))
        loss.backward()
    with pytest.raises(UsageError, match="cleared between two backward passes of one step"):
        run.learner.step(loss)


def test_training_another_model():
    run = Run()
    other = copy.deepcopy(run.model)
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    x, y = run.mixture.draw(run.learner.sample(8))
    F.cross_entropy(other(x), y).backward()
    with pytest.raises(UsageError, match="on the model that the learner has"):
        run.learner.step(1.0)


def replace_by_weight_norm(net):
    nn.utils.parametrizations.weight_norm(net[0])


def add_a_parameter(net):
    net[0].extra = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("change", [replace_by_weight_norm, add_a_parameter])
def test_a_model_that_has_changed_is_refused_by_name(change):
    run = Run(net=nn.Sequential(nn.Linear(16, 4))).train(2)
    change(run.model)
    with pytest.raises(UsageError, match="The model has changed since"):
        run.train(1)


def test_a_batch_of_another_size_than_the_actions():
    run = Run()
    x, y = run.mixture.draw(run.learner.sample(8))
    F.cross_entropy(run.model(x[:5]), y[:5]).backward()
    with pytest.raises(BatchSizeError, match=r"actions are for \[8\] example\(s\), the model saw \[5\]"):
        run.learner.step(1.0)
    run.optimizer.zero_grad()
    run.train(3)  # and the learner goes on
    assert run.reports[-1].rewarded


def test_micro_batches_under_one_draw_are_counted_in_the_error():
    run = Run()
    for part in run.learner.sample(64).chunk(4):
        x, y = run.mixture.draw(part)
        loss = F.cross_entropy(run.model(x), y) / 4
        loss.backward()
    with pytest.raises(BatchSizeError, match=r"for \[64\] example\(s\), the model saw \[16\] .*in 4 backward passes"):
        run.learner.step(loss)


def test_sampling_ahead_while_interleaving_is_refused_clearly():
    run = Run(interleave=True).train(1)
    ahead = run.learner.sample(8)
    run.learner.num_steps += 1
    x, y = run.mixture.draw(actions := run.learner.sample(8))
    assert ahead is not actions
    F.cross_entropy(run.model(x), y).backward()
    with pytest.raises(UsageError, match="right before each batch"):
        run.learner.step(1.0)


# ------------------------------------------------------------------ gradients that do not add up, and such as do


def test_gradients_that_are_never_cleared_are_noticed_on_the_second_step():
    run = Run()
    run.optimizer.zero_grad = lambda: None
    with pytest.raises(VerificationError, match=r"(?s)step before were not cleared.*The learner has been closed"):
        run.train(2)


def test_a_pass_that_does_not_belong_to_the_step_is_noticed_whenever_it_comes():
    """A kind of step that was not seen before is verified: here one with a side pass for an adversarial example."""
    run = Run().train(4)
    x, y = run.mixture.draw(run.learner.sample(64))
    x.requires_grad_()
    torch.autograd.grad(F.cross_entropy(run.model(x), y), x)
    loss = F.cross_entropy(run.model(x), y)
    loss.backward()
    with pytest.raises(VerificationError, match="learner.paused"):
        run.learner.step(loss)


def test_a_model_that_does_not_add_up_is_named_and_the_learner_closed():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(16, 4)
            self.bypassed = nn.Parameter(torch.ones(4))

        def forward(self, batch):
            return UnseenProduct.apply(self.used(batch), self.bypassed)

    run = Run(net=Functional())
    with pytest.raises(VerificationError, match="'bypassed'"):
        run.step()
    assert num_hooks(run.model) == 0
    with pytest.raises(UsageError, match="This learner is closed"):
        run.learner.sample(3)


def test_verify_on_every_step_sees_a_later_penalty():
    run = Run(verify=True).train(2)
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y) + 0.1 * run.model[2].weight.square().sum()
    loss.backward()
    with pytest.raises(VerificationError, match="'2.weight'"):
        run.learner.step(loss)
    assert Run(verify=False).train(2).reports[-1].rewarded


def test_gradients_that_really_are_zero_are_no_mistake():
    """Dead units leave gradients of zero at the outputs of layers that have none at their weights."""
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        net[0].bias.fill_(-1e3)
    run = Run(net=net).train(3)
    assert run.reports[-1].rewarded
    assert run.reports[-1].reward_mean == 0


def test_tiny_gradients_are_no_mistake():
    """A saturated loss: gradients whose squares are zero in float32."""
    net = nn.Linear(16, 4)
    run = Run([(x, torch.zeros(len(x), dtype=torch.long)) for x, _ in make_sources()], net=net, lr=0.0)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([60.0, 0.0, 0.0, 0.0]))
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        assert 0 < net.weight.grad.abs().max() < 1e-20
        report = run.learner.step(loss)
        run.optimizer.zero_grad()
    assert report.rewarded
