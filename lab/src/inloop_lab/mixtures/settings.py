"""The settings of a run on a mixture of text domains."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from inloop.errors import UsageError

MixtureName = Literal["uniform", "proportional", "tempered", "learned", "trail", "loss", "exp3", "oracle"]
ModelName = Literal["tiny", "small"]
PriorName = Literal["equal", "proportional"]
LEARNED = ("learned", "trail")


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """One run, of one or more seeds.

    Attributes:
        data: A folder with a file or a folder for each domain.
        tokenizer: A tokenizer file; empty for bytes.
        length: Tokens of a row.
        mixture: How domains are drawn. "learned": the default learner; "trail": judged by a trail; "loss": a softmax of the domains' losses; "exp3": online data mixing by
            the loss; "oracle": never the domains named by ``bad``.
        prior: The shares that a learned mixture begins with, and is anchored at.
        bad: Domains that the oracle leaves out, separated by commas.
        target: A file or folder whose rows judge a learned mixture; empty for the training data.
        held_out: Rows at the end of each domain that are not trained on.
        part: The share of each batch that is rewarded.
    """

    data: str
    tokenizer: str = ""
    model: ModelName = "tiny"
    length: int = 128
    batch: int = 32
    steps: int = 1000
    learning_rate: float = 2e-3
    mixture: MixtureName = "learned"
    prior: PriorName = "equal"
    temperature: float = 2.0
    floor: float = 0.0
    bad: str = ""
    target: str = ""
    held_out: int = 200
    part: float = 1.0
    bfloat16: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mixture", get_args(MixtureName)),
            ("model", get_args(ModelName)),
            ("prior", get_args(PriorName)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}.")
        for name, least in (("length", 2), ("batch", 2), ("steps", 1), ("held_out", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: allowed are whole numbers from {least}.")
        if not self.learning_rate > 0:
            raise UsageError(f"learning_rate={self.learning_rate}: allowed are numbers above 0.")
        if (self.mixture == "oracle") != bool(self.bad):
            raise UsageError("mixture='oracle' leaves out the domains named by bad, and needs them; nothing else does.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def folder_name(self) -> str:
        """A name for the run's folder: data, mixture, and the settings that are not usual."""
        usual = MixtureSettings(data=self.data)
        others = (
            "model",
            "length",
            "batch",
            "steps",
            "learning_rate",
            "prior",
            "floor",
            "held_out",
            "part",
            "bfloat16",
        )
        special = [f"{name}-{getattr(self, name)}" for name in others if getattr(self, name) != getattr(usual, name)]
        named = [f"{name}-{Path(value).stem}" for name in ("tokenizer", "target") if (value := getattr(self, name))]
        return "-".join(["mixture", Path(self.data).name, self.mixture, *named, *special])


# Options, each with the mixtures that use it.
ONLY_FOR = {
    **dict.fromkeys(("prior", "floor", "part"), LEARNED),
    "target": ("learned",),
    "temperature": ("tempered",),
    "bad": ("oracle",),
}
