"""The checkpoint's form, written and parsed: header, manifest, what makes it complete, checksums.

FORMAT.md beside this folder is its description.
"""
