"""The paper's augmentation experiment: augmentation that is learned while the network trains."""
