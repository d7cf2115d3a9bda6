"""TensorBoard, Weights & Biases and MLflow, for :class:`inloop.Records`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes scalars to a folder that TensorBoard reads."""

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Logs to a run of Weights & Biases.

    Args:
        run: The result of ``wandb.init``. It stays open for other logs.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        # The step is a field: wandb's own step cannot go back, and a continued run may have to.
        self.run.log({"inloop/step": step, **{f"inloop/{name}": value for name, value in numbers.items()}})

    def close(self) -> None:
        """Nothing: the run belongs to whoever began it."""


class MLflow:
    """Logs metrics to a run of MLflow.

    Args:
        run_id: The run's id, ``mlflow.start_run().info.run_id``.
    """

    def __init__(self, run_id: str) -> None:
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient()
        self.run_id = run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, 0, step) for name, value in numbers.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        """Nothing: the run belongs to whoever began it."""
