"""NCCL: its settings, its logs, its service."""
