"""Candidates and their costs become one plan. Costs are data: predicted by the model or measured by the tuner."""
