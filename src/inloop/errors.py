"""The errors of inloop. Every message names the value, the allowed values, and the fix."""


class InloopError(Exception):
    """Base of all errors of this library."""


class UsageError(InloopError, ValueError):
    """An argument, or an order of calls, without a meaning."""


class UnsupportedLayerError(InloopError, NotImplementedError):
    """A layer whose per-example contribution cannot be computed exactly; the message names it."""


class DirectionError(InloopError, ValueError):
    """A direction that does not fit the model: a missing, unknown or mis-shaped entry."""


class BatchSizeError(InloopError, ValueError):
    """Layers, or layers and actions, that disagree on the number of examples in the batch."""


class OverwrittenTensorError(InloopError, RuntimeError):
    """A recorded tensor that changed in place before its use."""


class VerificationError(InloopError, RuntimeError):
    """The recorded examples do not add up to the gradient of a parameter; the message names it."""


class LostProcessError(InloopError, RuntimeError):
    """Another process of a distributed run cannot be reached."""


class FileWriteError(InloopError):
    """A file that could not be written; the old file is unchanged."""


class CheckpointError(InloopError):
    """A checkpoint that is missing, damaged, or not written by inloop."""
