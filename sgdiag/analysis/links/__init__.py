"""A model of the links between GPUs, which must first reproduce what was published."""
