"""Checkpoints of any format, opened to look inside: no process group, no GPU, no pickle executed."""
