"""Simulations in virtual time, by the rules of real runs; ``sim.jobs``: of a shared cluster."""
