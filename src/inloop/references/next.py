"""The paper's reference: the next step."""

from inloop.references.reference import Reference
from inloop.step import Judge, Step


class Next(Reference):
    """Step t is judged by step t+1: its gradient and its loss, at the parameters that step t has led to."""

    is_next_gradient = True

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        rewarded, self.waiting = self.waiting, None if current.plain else current
        return rewarded, now
