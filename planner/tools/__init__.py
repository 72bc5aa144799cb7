"""What stands on top of the library: Hugging Face models, recipes, and the verbs that plan and draw.

Nothing outside of this folder imports it but the command, which lists its verbs.
"""
