"""The checks that a plan is made from: mu, sigma and out, their values, and the texts of the errors."""
