import json

import pytest
import torch

import inloop
from inloop.integrations.trackers import MLflow, TensorBoard, WandB
from inloop.records import read_records
from tests.integrations.plain_loop import make_mixture, make_net

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def train(path, *trackers, steps=6):
    net, mixture = make_net(), make_mixture()
    records = inloop.Records(path, *trackers, mixture=mixture, names=["bad", "good", "better"])
    learner = inloop.InLoop(net, inloop.MixturePolicy(3), callback=records, update=inloop.Reinforce(accumulate=1))
    for _ in range(steps):
        x, y = mixture.draw(learner.sample(12))
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        learner.step(loss)
        net.zero_grad()
    records.close()
    return read_records(path)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = train(tmp_path / "run.jsonl", TensorBoard(tmp_path / "board"))
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert {"probability/bad", "reward/good", "effective_epochs/better", "lag"} <= set(events.Tags()["scalars"])
    written = events.Scalars("probability/bad")
    assert [event.step for event in written] == [1, 2, 3, 4, 5, 6]
    assert written[-1].value == pytest.approx(records[-1]["probability/bad"], rel=1e-6)
    assert len(events.Scalars("reward/good")) == 5  # the first step pays nothing


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = wandb.init(mode="offline", project="test", dir=str(tmp_path))
    records = train(tmp_path / "run.jsonl", WandB(run))
    assert run.summary["inloop/probability/bad"] == pytest.approx(records[-1]["probability/bad"])
    assert run.summary["inloop/step"] == 6
    run.finish()


def test_mlflow_local_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        records = train(tmp_path / "run.jsonl", MLflow(run.info.run_id))
    history = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, "probability/bad")
    assert [metric.step for metric in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1].value == pytest.approx(records[-1]["probability/bad"])


def test_lines_of_a_run_that_was_killed_and_continued(tmp_path):
    train(tmp_path / "run.jsonl", steps=4)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "lag": 7.0}) + "\n" + '{"step": 4, "pro')
    records = read_records(tmp_path / "run.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[2]["lag"] == 7.0
    assert len(train(tmp_path / "run.jsonl", steps=1)) == 4  # and none is lost to the line that was cut off
