"""`python -m sgdiag` is `sgdiag`."""

from sgdiag.cli import main

main()
