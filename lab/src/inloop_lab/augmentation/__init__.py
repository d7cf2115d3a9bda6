"""The paper's augmentation experiment: augmentation learned while the network trains."""
