"""The kernels on a GPU: correctness under stress, mistakes that must be found, and latency.

``python -m kernels.pcie_allreduce.gputest --help``. It needs torch with CUDA and cuda-bindings, and nothing of sgdiag.
"""
