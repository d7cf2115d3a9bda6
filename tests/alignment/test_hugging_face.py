"""Hugging Face's models, built from a config with random weights, as they are."""

import pytest
import torch

from inloop import InLoop, MixturePolicy
from tests.alignment.exactness import assert_exact, relative_error, rewards_and_oracle

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = SIZES | {"vocab_size": 50, "max_position_embeddings": 16}
IMAGES = SIZES | {"image_size": 8, "patch_size": 4}


def read_text(model):
    ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids).logits


def translate(model):
    ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits


def look_at_images(model):
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=model.dtype)
    return model(pixel_values=images)[0 if model.config.model_type == "vit" else 1]


def listen(model):
    sound = torch.randn(4, 400, generator=torch.Generator().manual_seed(0), dtype=model.dtype)
    return model(sound).last_hidden_state


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    )


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))


def distilbert():
    sizes = {"vocab_size": 50, "dim": 12, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 16}
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**sizes))


def electra():
    return transformers.ElectraForSequenceClassification(transformers.ElectraConfig(**TEXT, embedding_size=12))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1))


def t5():
    sizes = {"d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)
    )


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES))


def clip():
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGES))


def wav2vec2():
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(**SIZES, **convolutions, **positions, mask_time_prob=0.0, layerdrop=0.0)
    )


def mamba():
    config = {"vocab_size": 50, "hidden_size": 12, "state_size": 4, "num_hidden_layers": 2}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**config))


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=3)
    )


MODELS = pytest.mark.parametrize(
    ("make", "forward"),
    [
        (gpt2, read_text),
        (bert, read_text),
        (distilbert, read_text),
        (electra, read_text),
        (llama, read_text),
        (t5, translate),
        (vit, look_at_images),
        (clip, look_at_images),
        (wav2vec2, listen),
    ],
)


@MODELS
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_models(make, forward):
    """With their dropout, which is replayed."""
    torch.manual_seed(0)
    assert_exact(make().double().train(), forward=forward)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_backbone_whose_hidden_states_are_collected_by_hooks():
    """A copy of the model needs these hooks, too: else it puts out nothing, and does not show where the examples are."""
    torch.manual_seed(0)
    config = {"num_windows": 2, "window_block_indexes": [0], "layer_norm_eps": 1e-6}
    model = transformers.RfDetrDinov2Backbone(transformers.RfDetrDinov2Config(**IMAGES, **config)).double().train()
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_exact(model, forward=lambda model: model(images).feature_maps[-1])


@pytest.mark.parametrize("make", [mamba, mixtral])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_models_that_compute_a_part_in_float32_whatever_they_are(make):
    torch.manual_seed(0)
    rewards_N, oracle_N = rewards_and_oracle(make().train(), forward=read_text)
    assert relative_error(rewards_N, oracle_N) < 1e-4


@MODELS
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_steps_judged_by_a_held_out_loss(make, forward):
    """Buffers that passes only read, as the numbers of positions, are not written: the step that waits has read them, too."""
    torch.manual_seed(0)
    model = make().train()

    def loss_of_model():
        return forward(model).square().mean()

    learner = InLoop(model, MixturePolicy(2), update=False, reference=loss_of_model)
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    assert versions or make not in (bert, distilbert, electra)
    for number in range(3):
        learner.sample(4)
        loss = loss_of_model()
        loss.backward()
        report = learner.step(loss)
        model.zero_grad()
        assert report.rewarded == (number > 0)
        assert report.dropped is None
    assert {name: buffer._version for name, buffer in model.named_buffers()} == versions
