"""Distributions over per-example choices: which source, which operation, which strength."""

from inloop.policies.actions import Actions as Actions
from inloop.policies.actions import concatenate as concatenate
from inloop.policies.actions import count_actions as count_actions
from inloop.policies.actions import map_actions as map_actions
from inloop.policies.actions import part_of as part_of
from inloop.policies.discrete import Bernoulli as Bernoulli
from inloop.policies.discrete import Categorical as Categorical
from inloop.policies.discrete import Discrete as Discrete
from inloop.policies.mixture import MixturePolicy as MixturePolicy
from inloop.policies.policy import Policy as Policy
from inloop.policies.policy import RewardSummary as RewardSummary
from inloop.policies.product import Product as Product
from inloop.policies.product import source_of as source_of
from inloop.policies.product import source_policy as source_policy
from inloop.policies.shares import Shares as Shares
from inloop.policies.sources import SourceInfo as SourceInfo
