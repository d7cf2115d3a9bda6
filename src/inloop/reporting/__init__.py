"""``inloop report``: a page on a run's records."""
