"""Kernels that travel with sgdiag, one package each."""
