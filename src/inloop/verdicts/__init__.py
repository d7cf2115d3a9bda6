"""Which source hurts? The rewards, losses and labels of its examples decide, over many steps, never its probability."""

from inloop.verdicts.advantage import Advantages as Advantages
from inloop.verdicts.excess import Told as Told
from inloop.verdicts.excess import told_by as told_by
from inloop.verdicts.statistics import SourceStatistics as SourceStatistics
from inloop.verdicts.statistics import statistics_for as statistics_for
from inloop.verdicts.verdict import LossEvidence as LossEvidence
from inloop.verdicts.verdict import SourceVerdict as SourceVerdict
