"""Warnings that are worth saying once in a process."""

import logging
from functools import cache

log = logging.getLogger("inloop")


@cache
def warn_once(text: str) -> None:
    log.warning("inloop: %s", text)
