"""Diagnostic and debugging toolkit for running SGLang servers."""

__version__ = "0.1.0"
