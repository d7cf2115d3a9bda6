"""A pretend CUDA device, ``cuda:0``, in a build of torch for the CPU. See ``plugin.py`` for how tests run on it.

Its memory is the host's, its kernels are those of the CPU. Like the real one it refuses tensors on other devices, runs backward passes on a
thread of its own, has generators and streams of its own, and rounds what tensor cores round. It notes where the host would wait for
the device (:func:`host_synchronisations`), and where streams would race (:func:`races`). It is not asynchronous and not fast, has no NCCL, no
cuDNN and no graphs, and no sparse tensors. Of torch's memory statistics it has the bytes of tensors, now and at most.
"""
