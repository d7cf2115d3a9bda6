"""Rewards of whole models against one backward pass for each example, in float64, by `inloop.check`.

    python results/exactness/compare.py

writes models.json beside this file, and the tables in README.md here and of the project. Hugging Face's models are built from a
config with random weights: exactness does not depend on their size.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import inloop
from inloop_lab.networks.transformers import gpt, vit_tiny
from inloop_lab.networks.wide_resnet import make_wide_resnet
from inloop_lab.page_block import with_block

COMMAND = "python results/exactness/compare.py"
HERE = Path(__file__).parent
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
TEXT = SIZES | {"vocab_size": 100, "max_position_embeddings": 32}


class Recurrent(nn.Module):
    """Words, an LSTM with the positions on its first axis, and two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(100, 16), nn.LSTM(16, 32), nn.Linear(32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        outputs, _ = self.cells(self.words(ids).transpose(0, 1))
        return self.head(outputs[-1])


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def predict_next(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(ids)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(dim=1)


def translate(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, decoder_input_ids=ids[:, :8]).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:8], reduction="none").mean(dim=1)


def classify_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1], reduction="none")


def models() -> dict[str, Callable[[], tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]]]:
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(2, (4,))
    ids = torch.randint(100, (4, 12))
    t5 = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return {
        "WRN-16-4, BatchNorm": lambda: (make_wide_resnet("wrn-16-4", 3, 10), (images, labels), classify),
        "WRN-16-4, GroupNorm": lambda: (make_wide_resnet("wrn-16-4-gn", 3, 10), (images, labels), classify),
        "ViT-Tiny": lambda: (vit_tiny(), (images, labels), classify),
        "GPT, 6 blocks": lambda: (gpt(length=32), torch.randint(256, (4, 32)), predict_next),
        "LSTM": lambda: (Recurrent(), (ids, labels), classify),
        "GPT-2": lambda: (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=2, n_head=4)
            ),
            ids,
            predict_next,
        ),
        "Llama": lambda: (
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)),
            ids,
            predict_next,
        ),
        "T5": lambda: (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=100, decoder_start_token_id=0, **t5)
            ),
            ids,
            translate,
        ),
        "ViT (Hugging Face)": lambda: (
            transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)),
            (images, labels),
            classify_images,
        ),
        "Mamba": lambda: (
            transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=100, hidden_size=48, state_size=8, num_hidden_layers=2)
            ),
            ids,
            predict_next,
        ),
    }


def main() -> None:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    results = []
    for name, make in models().items():
        model, batch, losses = make()
        model.train()
        for module in model.modules():  # random numbers would differ between the two computations
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        report = inloop.check(model, batch, losses)
        counted = [row for row in report.rows if row.relative_error is not None]
        again = sum("run again" in row.rule for row in counted)
        results.append(
            {
                "model": name,
                "ok": report.ok,
                "precision": report.dtype,
                "parameters": len(counted),
                "run_again": again,
                "max_relative_error": report.max_relative_error,
                "left_out": len(report.rows) - len(counted),
                "rules": sorted({row.rule for row in counted}),
            }
        )
        print(results[-1], report.problems, flush=True)
    (HERE / "models.json").write_text(json.dumps({"results": results}, indent=1) + "\n")
    for path, text in pages().items():
        path.write_text(text)


def rows() -> list[dict[str, Any]]:
    return json.loads((HERE / "models.json").read_text())["results"]


def in_brief() -> str:
    lines = ["| model | parameters compared | precision | largest relative error |", "|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['parameters']} | {row['precision']} | {row['max_relative_error']:.0e} |"
        for row in rows()
    ]
    return "\n".join(lines)


def table() -> str:
    lines = [
        "| model | parameters compared | by a rule or followed | run again | precision | largest relative error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        by_rule = row["parameters"] - row["run_again"]
        lines.append(
            f"| {row['model']} | {row['parameters']} | {by_rule} | {row['run_again']} | {row['precision']} | {row['max_relative_error']:.0e} |"
        )
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """The two pages, with the tables of the committed numbers."""
    contents = {HERE.parent.parent / "README.md": in_brief(), HERE / "README.md": table()}
    return {path: with_block(path.read_text(), COMMAND, content) for path, content in contents.items()}


if __name__ == "__main__":
    main()
