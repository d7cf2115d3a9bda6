"""The paper's reference: the next step."""

from inloop.references.reference import Reference
from inloop.step import Judge, Step


class Next(Reference):
    """Judges step t by step t+1: its gradient and its loss, at the parameters after step t."""

    is_next_gradient = True

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        rewarded, self.waiting = self.waiting, None if current.plain else current
        return rewarded, now
