"""Exact per-example gradient alignment for any model: record a step, then dot each example's gradient with a direction.

``recorder`` (hooks) -> ``tape`` (recorded layer calls) -> ``rules`` and ``black_box`` (one formula) -> rewards. From
the rest of the library this package imports only ``errors`` and ``distributed``.
"""

from inloop.alignment import layers as _layers  # noqa: F401  registers torch's layers
from inloop.alignment.call import LayerCall as LayerCall
from inloop.alignment.capture import Recording as Recording
from inloop.alignment.capture import capture as capture
from inloop.alignment.direction import Direction as Direction
from inloop.alignment.direction import gradients_of as gradients_of
from inloop.alignment.rules import affine_in_parameters as affine_in_parameters
from inloop.alignment.rules import alignment_rule as alignment_rule
from inloop.alignment.rules import linear_in_parameters as linear_in_parameters
from inloop.alignment.tape import Tape as Tape
