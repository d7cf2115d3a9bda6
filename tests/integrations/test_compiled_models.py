"""Compiled language models of other people: recording must not change what they compute."""

import pytest
import torch
import torch._dynamo.config

import inloop

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("limit", [8, 64])
def test_a_model_with_a_cache_of_keys_and_values(limit):
    """With a limit of 64, hooks that are traced by the compiler change the outputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.randint(50, (4, 7))
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=limit), inloop.capture(compiled):
        found = compiled(input_ids=ids, labels=ids)
        found.loss.backward()
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.past_key_values.layers[0].keys, expected.past_key_values.layers[0].keys)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)
