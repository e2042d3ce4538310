"""The commands of ``python -m multisample``."""
