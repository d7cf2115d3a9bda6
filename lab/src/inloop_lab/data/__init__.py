"""Labelled images for experiments: the digits that come with inloop, CIFAR, or a user's own."""
