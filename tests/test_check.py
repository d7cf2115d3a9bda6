"""``inloop check``: a table of every parameter, right or wrong, and what to do."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.alignment import linear_in_parameters
from inloop.alignment.rules import _RULES
from inloop.cli import main
from inloop.errors import UsageError
from tests.alignment.architectures import ARCHITECTURES


def classify(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def small(*layers, features=8):
    return nn.Sequential(*layers), (torch.randn(16, features), torch.randint(3, (16,))), classify


def test_a_model_that_is_exact():
    model, batch, losses = small(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    before = [p.clone() for p in model.parameters()]
    report = inloop.check(model, batch, losses)
    assert report.ok
    assert report.max_relative_error < 1e-9
    assert report.dtype == "float64"
    assert report.num_examples == 4
    assert inloop.check(model, (batch[0][:2], batch[1][:2]), losses).num_examples == 2
    assert [row.parameter for row in report.rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(row.exact and row.rule == "Linear" for row in report.rows)
    assert sum(row.cost for row in report.rows) == pytest.approx(1)
    assert sum(row.bytes_per_example for row in report.rows) == pytest.approx(8 * (8 + 16 + 16 + 3))
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name):
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    report = inloop.check(model, inputs, lambda model, inputs: model(*inputs).flatten(1).square().sum(1))
    assert report.ok, report.problems
    assert report.max_relative_error < 1e-9


def test_batchnorm_is_a_warning():
    report = inloop.check(*small(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    assert report.ok
    assert "BatchNorm in training mode" in report.warnings[0]
    assert [row.note for row in report.rows if not row.rule] == [
        "not counted; pass batchnorm_affine=True to count it"
    ] * 2


def test_examples_that_interact_are_wrong():
    def contrast(model, x):
        z = F.normalize(model(x), dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(x)).roll(1), reduction="none")

    report = inloop.check(nn.Sequential(nn.Linear(8, 4)), torch.randn(16, 8), contrast)
    assert not report.ok
    assert report.max_relative_error > 0.01
    assert report.interact
    assert "examples interact" in report.problems[0]


def test_a_wrong_rule_is_found():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    inloop.alignment_rule(Twice)(lambda call, direction: linear_in_parameters(call, direction).rows().roll(1))
    try:
        report = inloop.check(*small(nn.Linear(8, 4), Twice(4, 3)))
    finally:
        del _RULES[Twice]
    assert [row.parameter for row in report.rows if not row.exact] == ["1.weight", "1.bias"]
    assert not report.interact
    assert "a rule that you have registered is wrong" in report.problems[0]


def test_what_cannot_be_aligned_is_a_problem():
    model = nn.Sequential(nn.EmbeddingBag(9, 4, scale_grad_by_freq=True, mode="sum"), nn.Linear(4, 3))
    report = inloop.check(model, (torch.randint(9, (16, 5)), torch.randint(3, (16,))), classify)
    assert not report.ok
    assert "scale_grad_by_freq" in report.problems[0]
    assert report.as_dict()["max_relative_error"] is None


def test_frozen_unused_and_left_out_parameters_are_named():
    model, batch, losses = small(nn.Linear(8, 4), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    model.spare = nn.Linear(2, 2)
    model.forward = None
    report = inloop.check(_Uses(model[0], model[1], model.spare), batch, losses, layers=["second", "unused"])
    notes = {row.parameter: row.note for row in report.rows}
    assert notes["first.weight"] == "frozen"
    assert notes["first.bias"] == "not counted (layers=)"
    assert notes["unused.weight"] == "does not enter the loss"
    assert report.ok


class _Uses(nn.Module):
    def __init__(self, first, second, unused):
        super().__init__()
        self.first, self.second, self.unused = first, second, unused

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("batch", "losses", "message"),
    [
        (torch.randn(4, 8), lambda model, x: model(x).sum(), r"gave shape \(\)"),
        (torch.randn(4, 8), lambda model, x: 3, "gave int"),
        (torch.randn(1, 8), lambda model, x: model(x).sum(1), "one example"),
    ],
)
def test_losses_that_are_not_one_for_each_example_are_refused(batch, losses, message):
    with pytest.raises(inloop.InloopError, match=message):
        inloop.check(nn.Linear(8, 3), batch, losses)


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "mine_to_check.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def good():\n    return nn.Linear(3, 2), torch.randn(8, 3), lambda m, x: m(x).sum(1)\n"
        "def coupled():\n    return nn.Linear(3, 2), torch.randn(8, 3), lambda m, x: m(x).sum(1) * m(x).sum()\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("mine_to_check", None)


def test_the_command(project, capsys):
    assert main(["check", "mine_to_check:good"]) == 0
    shown = capsys.readouterr().out
    assert "weight" in shown
    assert "exact" in shown
    assert main(["check", "mine_to_check:coupled"]) == 1
    assert "examples interact" in " ".join(capsys.readouterr().out.split())


def test_the_command_for_scripts(project, capsys):
    assert main(["check", "mine_to_check:good", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["max_relative_error"] < 1e-9
    assert {row["parameter"] for row in report["rows"]} == {"weight", "bias"}


@pytest.mark.parametrize(
    "target", ["mine_to_check", "mine_to_check:nothing", "no_such_module:good", "mine_to_check:number", ":good"]
)
def test_targets_that_are_none_are_refused(target, project, capsys):
    assert main(["check", target]) == 2
    assert "inloop:" in capsys.readouterr().err


class AlwaysFloat32(nn.Module):
    """Computes a part in float32, as the scans of some models do, and rounds what it gives."""

    def __init__(self):
        super().__init__()
        self.decay, self.head = nn.Parameter(torch.rand(6)), nn.Linear(6, 1)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0], dtype=torch.float32)
        for position in x.unbind(1):
            state = torch.exp(-self.decay.float()) * state + position.float()
        return self.head(state.to(x.dtype)).squeeze(1)


def test_a_model_that_rounds_to_float32_is_compared_in_its_own_precision():
    torch.manual_seed(0)
    report = inloop.check(AlwaysFloat32(), torch.randn(4, 9, 6), lambda model, x: model(x) ** 2)
    assert report.ok, report.problems
    assert report.dtype == "float32"
    assert report.num_examples == 4
    assert any("less than float64" in text for text in report.warnings)


class _Once(torch.autograd.Function):
    """Doubles its input; its backward pass is right only the first time, as that of reversible layers may be."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2.0
        return 2 * x

    @staticmethod
    def backward(ctx, dout):
        dx, ctx.factor = ctx.factor * dout, 3.0
        return dx


def test_a_backward_pass_that_cannot_be_repeated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.dropout = nn.Linear(8, 5), nn.Linear(5, 3), nn.Dropout(0.3)

        def forward(self, x):
            return self.last(_Once.apply(self.dropout(self.first(x))))

    report = inloop.check(Model(), *small()[1:])
    assert report.ok
    assert report.max_relative_error < 1e-9


def test_losses_that_nothing_recorded_enters_are_no_success():
    model, (x, y), _ = small(nn.Linear(8, 3))
    other = nn.Linear(8, 3)
    closes_over_another = inloop.check(model, (x, y), lambda model, batch: classify(other, batch))
    assert not closes_over_another.ok
    assert "No parameter of the model was compared" in closes_over_another.problems[0]

    def functional(model, batch):
        parameters = dict(model.named_parameters())

        def loss(x, y):
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

        return torch.func.vmap(loss)(*batch)

    report = inloop.check(model, (x, y), functional)
    assert not report.ok
    assert "Parameter '0.weight' enters the loss" in report.problems[0]


@pytest.mark.parametrize(
    ("model", "message"),
    [(abs, "a torch.nn.Module is needed"), (nn.Linear(2, 2).requires_grad_(False), "no parameter")],
)
def test_models_that_cannot_be_checked(model, message):
    with pytest.raises(UsageError, match=message):
        inloop.check(model, torch.zeros(4, 2), classify)


class Graphs(nn.Module):
    """Mean of the nodes of each graph; the nodes of all graphs are on one axis."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, nodes, graph_of_node):
        sums = torch.zeros(int(graph_of_node.max()) + 1, 4, dtype=nodes.dtype).index_add(0, graph_of_node, nodes)
        return self.layer(sums)


def test_a_batch_that_cannot_be_cut_is_refused_with_the_fix():
    graph_of_node = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5])
    batch = torch.randn(9, 4), graph_of_node, torch.arange(6) % 3

    def losses(model, batch):
        nodes, graph_of_node, labels = batch
        return F.cross_entropy(model(nodes, graph_of_node), labels, reduction="none")

    with pytest.raises(UsageError, match="works with 6 examples, and not with the first 4 .* Fix: num_examples=6"):
        inloop.check(Graphs(), batch, losses)
    assert inloop.check(Graphs(), batch, losses, num_examples=6).ok


def test_losses_may_need_gradients_themselves():
    model, (x, y), _ = small(nn.Linear(8, 3))

    def with_a_gradient(model, batch):
        x, y = batch
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x)
        return F.cross_entropy(model(x), y, reduction="none") * (1 + slope.detach().square().sum(1))

    report = inloop.check(model, (x, y), with_a_gradient)
    assert not report.ok  # the gradient of another scalar reached the recorded layers, too
    assert "its gradient has the norm" in report.problems[0]


def test_losses_that_cannot_be_checked():
    model, (x, y), losses = small(nn.Linear(8, 3))
    with pytest.raises(UsageError, match="without a gradient"):
        inloop.check(model, (x, y), lambda model, batch: losses(model, batch).detach())
    with pytest.raises(UsageError, match="a function losses"):
        inloop.check(model, losses, (x, y))
    with pytest.raises(UsageError, match="has no example"):
        inloop.check(model, (x[:0], y[:0]), losses)


def test_numbers_that_are_none_are_said_to_be():
    model, (x, y), losses = small(nn.Linear(8, 3))
    report = inloop.check(model, (x * float("nan"), y), losses)
    assert not report.ok
    assert "nan or infinite numbers" in report.problems[0]
