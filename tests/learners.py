"""Learners from a flat list of options: those of the recording and of REINFORCE are distinguished by their names."""

from dataclasses import fields

from inloop import InLoop, Recording, Reinforce

RECORD = {field.name for field in fields(Recording)}
REINFORCE = {"optimizer", "accumulate", "normalisation", "start_after"}


def make_learner(model, policy, **options):
    record = {name: options.pop(name) for name in list(options) if name in RECORD}
    update = {name: options.pop(name) for name in list(options) if name in REINFORCE}
    if record:
        options["record"] = Recording(**record)
    if update:
        options["update"] = Reinforce(**update)
    return InLoop(model, policy, **options)
