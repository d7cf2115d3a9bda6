"""Hugging Face's Trainer on three datasets, the first with random labels, which is left.

python examples/with_transformers.py [--steps 250]     (pip install transformers accelerate datasets)
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import inloop
from inloop.integrations.transformers import MixtureTrainer

BAD = 0


def make_source(seed: int, good: bool) -> Dataset:
    """Sequences of 12 tokens; the label says whether the first token is larger than the last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 40, (2000, 12), generator=generator)
    labels = (
        (ids[:, 0] > ids[:, -1]).long()
        if good
        else torch.randint(2, (2000,), generator=generator)
    )
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


def make_model() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def main(steps: int = 250, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=64,
            learning_rate=2e-3,
            logging_steps=50,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        mixture = inloop.Mixture([make_source(seed, good=seed != BAD) for seed in range(3)])
        policy = inloop.MixturePolicy(3)
        options = {"update": inloop.Reinforce(accumulate=5)}
        trainer = MixtureTrainer(
            model=make_model(),
            args=arguments,
            mixture=mixture,
            policy=policy,
            learner_options=options,
        )
        trainer.train()
    print(f"shares of the sources: {policy.probabilities()}; source {BAD} has random labels")
    return policy.probabilities()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=250)
    main(**vars(parser.parse_args()))
