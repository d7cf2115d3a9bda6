"""``inloop report``: a page on what a run has left behind."""
