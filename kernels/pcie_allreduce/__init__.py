"""Small allreduces between GPUs that see each other over PCIe only."""
