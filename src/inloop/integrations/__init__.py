"""Adapters for trainers and trackers. Each file needs a package of its own, and is imported only on request."""
