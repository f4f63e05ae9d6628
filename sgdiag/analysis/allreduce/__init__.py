"""Small allreduces on one host: how its GPUs are joined, what was measured, and what follows from both. Pure."""
