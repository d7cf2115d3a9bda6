"""The memory and traffic of inloop with models of 1B and 70B parameters: derived from their shapes, checked on a small model.

    python -m benchmarks.plan          (pip install transformers)

writes results/cost/plan.json, and the table of docs/scaling.md.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.kept import kept_bytes

import inloop
from inloop_lab.page_block import with_block

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results/cost/plan.json"
GB = 1e9
LINK = 50e9  # bytes a second that an accelerator receives: 400 Gbit/s
FLOPS = 400e12  # an accelerator's, in bfloat16, at best
USED = 0.4  # share of them that training reaches
TOKENS = 4096  # in a sequence
GLOBAL_BATCH = 1024  # sequences


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama: grouped-query attention, a gated feed-forward network, RMSNorm."""

    name: str
    layers: int
    width: int
    key_width: int
    hidden: int
    vocabulary: int
    tied: bool

    def parameters(self) -> int:
        layer = 2 * self.width * (self.width + self.key_width) + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + self.width + (1 if self.tied else 2) * self.vocabulary * self.width

    def kept_per_token(self) -> int:
        """Numbers that a tape keeps: each layer's input, once if several share it, and the gradient of its output."""
        inputs = 5 * self.width + self.hidden  # of both norms, of q k v, of o, of gate and up; of down
        gradients = 5 * self.width + 2 * self.key_width + 2 * self.hidden  # norms, q, o, down; k, v; gate, up
        ends = (
            self.width + 3 * self.width + self.vocabulary
        )  # embedding's dout; last norm's x and dout, head's x; logits
        return self.layers * (inputs + gradients) + ends


# Shapes from the published configurations of Llama 3.2 1B and Llama 3.1 70B.
LARGE = (
    Shape("1B", 16, 2048, 512, 8192, 128256, tied=True),
    Shape("70B", 80, 8192, 1024, 28672, 128256, tied=False),
)
SMALL = Shape("small", 2, 64, 32, 128, 300, tied=False)


def measured_per_token(shape: Shape, tokens: int = 32) -> float:
    """Numbers that a real tape of a small Llama in bfloat16 keeps for each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=4 * shape.key_width // shape.width,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(shape.vocabulary, (4, tokens))
    with inloop.capture(model) as tape:
        model(ids, labels=ids).loss.backward()
    return kept_bytes(tape.calls) / 2 / (4 * tokens)


def plan(shape: Shape, accelerators: int) -> dict[str, float | str | int]:
    """The needs of one step with FSDP2, gradients in float32, the rest in bfloat16."""
    sequences = max(1, GLOBAL_BATCH // accelerators)
    tape = 2 * TOKENS * shape.kept_per_token()
    compute = 6 * shape.parameters() * TOKENS * GLOBAL_BATCH / (accelerators * FLOPS * USED)
    gather = 4 * shape.parameters() * (accelerators - 1) / accelerators
    own = (
        (2 + 2 + 4) * shape.parameters() * (accelerators - 1) / accelerators
    )  # two gathers of parameters, one reduction
    control = (accelerators - 1) * (8 + 5 * 8 + 8 * sequences)
    return {
        "model": shape.name,
        "accelerators": accelerators,
        "sequences_each": sequences,
        "tape_gb_per_sequence": tape / GB,
        "tape_gb_per_sequence_one_block": 2 * TOKENS * (shape.kept_per_token() / shape.layers) / GB,
        "parameter_copy_gb": 2 * shape.parameters() / accelerators / GB,
        "step_seconds": compute,
        "gather_gb": gather / GB,
        "gather_seconds": gather / LINK,
        "gather_share_of_fsdp_traffic": gather / own,
        "control_bytes": control,
        "alignment_share_of_step": 1 / 3,  # a forward pass of all layers, of the three that a step costs
    }


def main() -> None:
    measured = measured_per_token(SMALL)
    result = {
        "assumptions": {
            "link_bytes_per_second": LINK,
            "flops": FLOPS,
            "used": USED,
            "tokens": TOKENS,
            "batch": GLOBAL_BATCH,
        },
        "shapes": [
            asdict(shape) | {"parameters": shape.parameters(), "kept_per_token": shape.kept_per_token()}
            for shape in LARGE
        ],
        "check": {"formula": SMALL.kept_per_token(), "measured": measured},
        "plans": [plan(shape, accelerators) for shape in LARGE for accelerators in (8, 64, 1024)],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for page, text in pages().items():
        page.write_text(text)
    print(table(result["plans"]))


def pages() -> dict[Path, str]:
    """The page, with the table of the committed numbers."""
    page = ROOT / "docs/scaling.md"
    plans = json.loads(RESULT.read_text())["plans"]
    return {page: with_block(page.read_text(), "python -m benchmarks.plan", table(plans))}


def table(plans: list[dict[str, float | str | int]]) -> str:
    lines = [
        "| model | accelerators | sequences each | tape, GB a sequence | of one block | messages, kB a step | gather, GB | gather, s | step, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = (
        f"| {p['model']} | {p['accelerators']} | {p['sequences_each']} | {p['tape_gb_per_sequence']:.1f} | "
        f"{p['tape_gb_per_sequence_one_block']:.2f} | {p['control_bytes'] / 1000:.0f} | {p['gather_gb']:.0f} | "
        f"{p['gather_seconds']:.2f} | {p['step_seconds']:.1f} |"
        for p in plans
    )
    return "\n".join([*lines, *rows])


if __name__ == "__main__":
    main()
