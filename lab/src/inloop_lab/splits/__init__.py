"""The paper's split experiment: which of several splits is bad."""
