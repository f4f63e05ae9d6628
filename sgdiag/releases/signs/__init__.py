"""What failures look like in logs, and the pass over a log that finds them."""
