"""From a plan to a complete checkpoint: a rank's file, the bytes that stream into it, the ranks' end together."""
