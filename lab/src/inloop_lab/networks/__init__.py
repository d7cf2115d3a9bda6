"""The networks of the experiments: small ones for splits, wide residual ones for augmentation, transformers to measure."""
