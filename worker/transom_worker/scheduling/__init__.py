"""Integers only: a StepPlan out, a StepResult in."""
