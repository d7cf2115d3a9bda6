"""Which source hurts? The rewards of its examples over many steps decide, never its probability."""

from inloop.verdicts.advantage import Advantages as Advantages
from inloop.verdicts.excess import ExampleEvidence as ExampleEvidence
from inloop.verdicts.excess import evidence_of as evidence_of
from inloop.verdicts.statistics import SourceStatistics as SourceStatistics
from inloop.verdicts.statistics import statistics_for as statistics_for
from inloop.verdicts.verdict import LossEvidence as LossEvidence
from inloop.verdicts.verdict import SourceVerdict as SourceVerdict
