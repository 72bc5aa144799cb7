"""Where files lie: folders, and object stores behind URLs."""
