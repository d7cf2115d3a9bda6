"""Data sources, and batches drawn from them as a policy says."""

from inloop.mixture.mixture import Mixture as Mixture
