"""The paper's section 5.2: augmentation that is learned while the network trains."""
