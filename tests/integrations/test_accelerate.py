import pytest
import torch
import torch.nn.functional as F

import inloop
from tests.integrations.plain_loop import CLIP, assert_same, make_mixture, make_net, make_options, train_plainly

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def train(steps, micro_batches, folder=None, save_at=None, resume=False):
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=micro_batches, cpu=True)
    net, mixture, record = make_net(), make_mixture(), []
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.2))
    learner = inloop.InLoop(net, inloop.MixturePolicy(3), optimizer=optimizer, **make_options())
    loader = mixture.loader(learner, 16, micro_batches=micro_batches, num_batches=steps * micro_batches)
    accelerator.register_for_checkpointing(learner, loader)
    if resume:
        accelerator.load_state(folder)
    for _, (x, y) in loader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                report = learner.step(loss)
                record.append((report.probabilities, report.reward_mean))
                accelerator.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and learner.num_steps == save_at:
            accelerator.save_state(folder)
    return record


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_same_as_the_plain_loop(micro_batches):
    assert_same(train(12, micro_batches), train_plainly(12, micro_batches=micro_batches))


def test_learner_and_loader_continue_from_its_checkpoint(tmp_path):
    whole = train(12, 1, str(tmp_path), save_at=5)
    assert_same(train(12, 1, str(tmp_path), resume=True), whole[5:])
