"""The paper's section 5.1: which of several splits is bad."""
