"""Is inloop right on this machine's GPU, and what does it cost there? See ``__main__.py``."""
