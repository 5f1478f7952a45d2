"""Journals: where failback keeps calls that must survive the process."""
