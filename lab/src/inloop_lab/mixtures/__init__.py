"""Mixtures of text domains for small language models, learned while the model trains."""
