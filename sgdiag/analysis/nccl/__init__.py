"""The memory that NCCL takes."""
