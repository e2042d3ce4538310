"""Model parameters: their structure, their ids, their memory, and the plan that perturbs them."""
