"""What runs in a server: the CUDA source, its builder, the mailboxes and the class that launches the kernels."""
