"""inloop in the trainers and trackers that people use. Each file needs its own package, and is imported only on request."""
