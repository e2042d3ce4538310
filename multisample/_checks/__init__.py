"""Checks of mu, sigma and out, and of their values, when a plan is made."""
