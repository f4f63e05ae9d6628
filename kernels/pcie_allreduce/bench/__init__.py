"""One rank of `sgdiag bench-allreduce`, in an interpreter that has torch; see ``__main__``."""
