"""The commands that the lab adds to ``inloop``: ``run`` and ``bench``."""
