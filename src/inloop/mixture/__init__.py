"""Data sources, and batches that a policy draws from them."""

from inloop.mixture.mixture import Mixture as Mixture
