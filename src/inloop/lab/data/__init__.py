"""Labelled images: the digits that come with the package, CIFAR, or one's own."""

from inloop.lab.data.digits import digit_sources as digit_sources
from inloop.lab.data.digits import digits as digits
from inloop.lab.data.digits import load_digits as load_digits
from inloop.lab.data.images import DataError as DataError
from inloop.lab.data.images import ImageData as ImageData
from inloop.lab.data.images import to_input as to_input
from inloop.lab.data.named import load_data as load_data
