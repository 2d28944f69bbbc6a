"""Values in, values out: what ficc decides, without a clock, randomness, disk or network.

Time, identifiers and randomness are arguments. Every lifecycle is one module with one table.
"""
