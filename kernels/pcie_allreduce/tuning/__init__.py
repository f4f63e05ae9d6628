"""Which kernel takes which size on this host: probed, measured against NCCL, agreed by all ranks, kept in a file."""
