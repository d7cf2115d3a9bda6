"""References: what judges step t. One file each; your own subclasses :class:`Reference`.

next        the gradient of step t+1 (the paper)
previous    the gradient of step t-1
held-out    the gradient of a loss on held-out data, at θ_{t+1}
other half  the two micro-batches of step t by each other's gradients
trail       the way from an average of earlier parameters to θ_t
"""

from inloop.references.default import Named as Named
from inloop.references.default import as_reference as as_reference
from inloop.references.held_out import HeldOut as HeldOut
from inloop.references.held_out import HeldOutLoss as HeldOutLoss
from inloop.references.held_out import held_out_judge as held_out_judge
from inloop.references.next import Next as Next
from inloop.references.other_half import OtherHalf as OtherHalf
from inloop.references.previous import Previous as Previous
from inloop.references.reference import Reference as Reference
from inloop.references.trail import Trail as Trail
