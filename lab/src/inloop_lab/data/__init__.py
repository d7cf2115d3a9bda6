"""Labelled images for experiments: the digits that come with inloop, CIFAR, or one's own."""
