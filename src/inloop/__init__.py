"""inloop learns the data distribution while the model trains, from the alignment of per-example gradients."""

# image augmentation, and digits to try things with
from inloop import augment as augment
from inloop import datasets as datasets

# exact per-example gradient alignment
from inloop.alignment import Recording as Recording
from inloop.alignment import alignment_rule as alignment_rule
from inloop.alignment import capture as capture
from inloop.checking import Check as Check
from inloop.checking import check as check

# files of a run
from inloop.checkpoints import Checkpoints as Checkpoints

# the base of all errors
from inloop.errors import InloopError as InloopError

# learning a distribution while a model trains
from inloop.learner import InLoop as InLoop
from inloop.metagradient import MetaGradient as MetaGradient

# drawing batches
from inloop.mixture import Mixture as Mixture
from inloop.paper import paper_policy as paper_policy
from inloop.paper import paper_settings as paper_settings

# distributions over per-example choices
from inloop.policies import Bernoulli as Bernoulli
from inloop.policies import Categorical as Categorical
from inloop.policies import MixturePolicy as MixturePolicy
from inloop.policies import Policy as Policy
from inloop.policies import Product as Product
from inloop.records import Records as Records

# how a policy learns
from inloop.updates import Reinforce as Reinforce

__version__ = "0.1.0"
