"""What inloop raises. Every message says what was got, what is allowed, and how to fix it."""


class InloopError(Exception):
    """Base of all errors of this library."""


class UsageError(InloopError, ValueError):
    """An argument or an order of calls that cannot mean anything."""


class UnsupportedLayerError(InloopError, NotImplementedError):
    """A layer whose per-example contribution cannot be computed exactly; the message names it."""


class DirectionError(InloopError, ValueError):
    """A direction that does not fit the model: a missing, unknown or mis-shaped entry."""


class BatchSizeError(InloopError, ValueError):
    """Layers, or layers and actions, that disagree on how many examples the batch holds."""


class OverwrittenTensorError(InloopError, RuntimeError):
    """A recorded tensor that was changed in place before it was used."""


class VerificationError(InloopError, RuntimeError):
    """The recorded examples do not add up to the gradient of a parameter; the message names it."""


class LostProcessError(InloopError, RuntimeError):
    """Another process of a distributed run cannot be reached."""


class FileWriteError(InloopError):
    """A file that could not be written; what was there before is still there."""


class CheckpointError(InloopError):
    """A checkpoint that is not there, damaged, or none of ours."""
