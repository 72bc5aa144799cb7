"""From keys to filled tensors: the manifest's parts, who wrote what, exact byte ranges, their checks."""
